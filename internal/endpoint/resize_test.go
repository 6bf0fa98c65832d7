package endpoint_test

import (
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
)

// mtus reads the MTU of both halves and of the record.
func (b *bench) mtus(ns *endpointtest.Netns, key endpoint.Key) (s string) {
	b.t.Helper()
	for _, ep := range b.List() {
		if ep.Key() != key {
			continue
		}
		host, err := netlink.LinkByName(ep.HostIfName)
		if err != nil {
			b.t.Fatal(err)
		}
		s = fmt.Sprint("host ", host.Attrs().MTU, ", record ", ep.MTU)
		ns.Do(b.t, func() error {
			pod, err := netlink.LinkByName(ep.IfName)
			if err == nil {
				s = fmt.Sprint("pod ", pod.Attrs().MTU, ", ", s)
			}
			return err
		})
	}
	return s
}

// Existing pods follow the node's MTU, down and up, at once or with the next
// start of the agent; CHECK then compares with the new one.
func TestPodsFollowTheMTU(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web")
	ep := b.add(req)
	smaller, smallerNs := b.request("smaller")
	b.add(smaller)
	shrink := func(n *endpointtest.Netns, to int) {
		n.Do(t, func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return netlink.LinkSetMTU(link, to)
		})
	}
	shrink(smallerNs, 1300)
	for _, mtu := range []int{1350, 8950, 1280, 1450} {
		b.mtu = mtu
		if mtu == 1280 { // the agent was away meanwhile
			if err := b.restart(); err != nil {
				t.Fatal(err)
			}
		} else if mended, err := b.Repair(t.Context()); err != nil || len(mended) > 0 {
			t.Fatalf("MTU %d: mended %v, %v", mtu, mended, err)
		}
		if got, want := b.mtus(ns, req.Key()), fmt.Sprintf("pod %d, host %d, record %d", mtu, mtu, mtu); got != want {
			t.Errorf("%s, want %s", got, want)
		}
		if err := b.Check(t.Context(), req); err != nil {
			t.Error(err)
		}
		b.expectTraffic(ns, ep)
	}
	// A pod whose own MTU somebody made smaller keeps it while it fits.
	if got, want := b.mtus(smallerNs, smaller.Key()), "pod 1450, host 1450, record 1450"; got != want {
		t.Errorf("cut to 1280 and followed again: %s, want %s", got, want)
	}
	shrink(smallerNs, 1300)
	b.mtu = 1400
	if _, err := b.Repair(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := b.mtus(smallerNs, smaller.Key()), "pod 1300, host 1400, record 1400"; got != want {
		t.Errorf("made smaller by hand: %s, want %s", got, want)
	}
	// The host's half is brought back.
	link, err := netlink.LinkByName(ep.HostIfName)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMTU(link, 1300); err != nil {
		t.Fatal(err)
	}
	if mended, err := b.Repair(t.Context()); err != nil || len(mended) != 1 {
		t.Errorf("mended %v, %v", mended, err)
	}
	if got, want := b.mtus(ns, req.Key()), "pod 1400, host 1400, record 1400"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	b.del(smaller)
	b.del(req)
	b.expectNothing()
}

// A pod that is made while the MTU changes has the new one.
func TestNewPodMeetsAChangeOfMTU(t *testing.T) {
	b := newBench(t)
	b.SetStep(func(s string) {
		if s == "created" {
			b.mtu = 1350
		}
	})
	req, ns := b.request("web")
	if ep := b.add(req); ep.MTU != 1350 {
		t.Errorf("ADD answers with an MTU of %d", ep.MTU)
	}
	if got, want := b.mtus(ns, req.Key()), "pod 1350, host 1350, record 1350"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	b.del(req)
}
