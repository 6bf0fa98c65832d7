package endpoint_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/endpoint"
)

// device returns a device of the host.
func device(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return l
}

// addIngress does what another plugin does to limit what a pod sends.
func addIngress(ep endpoint.Endpoint) error {
	return netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ep.HostIfindex, Parent: netlink.HANDLE_INGRESS, Handle: netlink.MakeHandle(0xffff, 0),
	}})
}

// A pod that is to send at a limited rate has its programs, routes and
// neighbours on a device over the host's half, which is in place, and down,
// before policy is; where the programs leave place for an ingress qdisc it has
// what any pod has.
func TestSendLimited(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("limited", "10.244.80.65", "fd00:10:244:50::65")
	req.SendLimited = true
	plain := b.add(req)
	if plain.Over != "" || len(hostLinks(t)) != 1 {
		t.Errorf("with tcx: %+v", plain)
	}
	b.del(req)
	b.expectNothing()

	b.fakes.Clsact = true
	unlimited, _ := b.request("unlimited")
	if ep := b.add(unlimited); ep.Over != "" {
		t.Errorf("not limited: %+v", ep)
	}
	b.del(unlimited)
	b.fakes.Calls()

	var on []string
	b.fakes.Hook = func(_ context.Context, call string, ep endpoint.Endpoint) error {
		if call != "up" {
			on = append(on, call+" "+ep.HostIfName)
		}
		if call != "detach" {
			for _, l := range hostLinks(t) {
				if l.Attrs().Flags&net.FlagUp != 0 {
					t.Errorf("%s is up at %s", l.Attrs().Name, call)
				}
			}
		}
		return nil
	}
	req, ns = b.request("limited", "10.244.80.65", "fd00:10:244:50::65")
	req.SendLimited = true
	ep := b.add(req)
	b.fakes.Hook = nil
	if calls := b.fakes.Calls(); !slices.Equal(calls, []string{"wire", "attach", "up"}) ||
		!slices.Equal(on, []string{"wire " + ep.HostIfName, "attach " + ep.Over}) {
		t.Errorf("calls %v on %v", calls, on)
	}
	if name, index := ep.Device(); name != endpoint.OverName(ep.HostIfName) || index != device(t, name).Attrs().Index || index == ep.HostIfindex {
		t.Errorf("its device is %s, index %d", name, index)
	}
	over, ok := device(t, ep.Over).(*netlink.Macvlan)
	if !ok || over.Mode != netlink.MACVLAN_MODE_PASSTHRU || over.ParentIndex != ep.HostIfindex || over.HardwareAddr.String() != ep.HostMAC.String() {
		t.Errorf("over the veth is %+v", device(t, ep.Over))
	}
	if err := addIngress(ep); err != nil {
		t.Errorf("an ingress qdisc: %v", err)
	}
	check := func(what string) {
		t.Helper()
		if err := b.Check(t.Context(), req); err != nil {
			t.Errorf("%s: CHECK: %v", what, err)
		}
		b.expectTraffic(ns, b.List()[0])
	}
	check("new")
	if mended, err := b.Repair(t.Context()); err != nil || len(mended) != 0 {
		t.Errorf("mended %q, %v", mended, err)
	}
	if err := b.restart(); err != nil {
		t.Fatal(err)
	}
	if calls := b.fakes.Calls(); !slices.Equal(calls, []string{"wire", "attach", "up"}) {
		t.Errorf("calls at a restart: %v", calls)
	}
	check("restart")

	// The MTU, down and up.
	for _, n := range []int{1350, 1440} {
		b.mtu = n
		if _, err := b.Repair(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := device(t, ep.Over).Attrs().MTU; got != n {
			t.Errorf("MTU %d of %s, want %d", got, ep.Over, n)
		}
		check("MTU")
	}
	b.del(req)
	b.expectNothing()
}

// Somebody takes away what is over the veth, or changes it: CHECK says so, and
// it is made again, with its programs before it is up.
func TestOverIsMended(t *testing.T) {
	b := newBench(t)
	b.fakes.Clsact = true
	req, ns := b.request("limited")
	req.SendLimited = true
	ep := b.add(req)
	b.fakes.Calls()
	for what, spoil := range map[string]func() error{
		"gone": func() error { return netlink.LinkDel(device(t, ep.Over)) },
		"another in its place": func() error {
			return errors.Join(netlink.LinkDel(device(t, ep.Over)),
				netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: ep.Over}, PeerName: "pwpeer"}))
		},
		"of another mode": func() error {
			return errors.Join(netlink.LinkDel(device(t, ep.Over)),
				netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: ep.Over, ParentIndex: ep.HostIfindex}, Mode: netlink.MACVLAN_MODE_BRIDGE}))
		},
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		expectCode(t, b.Check(t.Context(), req), endpoint.CodeDiffers, ep.Over)
		b.fakes.Hook = func(_ context.Context, call string, _ endpoint.Endpoint) error {
			if call == "attach" || call == "up" {
				if l := device(t, ep.Over); l.Attrs().Flags&net.FlagUp != 0 {
					t.Errorf("%s: it is up at %s", what, call)
				}
			}
			return nil
		}
		mended, err := b.Repair(t.Context())
		b.fakes.Hook = nil
		if err != nil || !strings.Contains(fmt.Sprint(mended), ep.Over) {
			t.Errorf("%s: mended %q, %v", what, mended, err)
		}
		if calls := b.fakes.Calls(); !slices.Equal(calls, []string{"wire", "attach", "up"}) {
			t.Errorf("%s: calls %v", what, calls)
		}
		if now := b.List()[0]; now.OverIfindex != device(t, ep.Over).Attrs().Index {
			t.Errorf("%s: %+v", what, now)
		}
		if err := b.Check(t.Context(), req); err != nil {
			t.Errorf("%s: CHECK: %v", what, err)
		}
		b.expectTraffic(ns, b.List()[0])
	}
	for _, s := range []string{"ipv4/conf/" + ep.Over + "/rp_filter", "ipv6/conf/" + ep.HostIfName + "/drop_unicast_in_l2_multicast"} {
		if err := os.WriteFile("/proc/sys/net/"+s, []byte("0"), 0o644); err != nil {
			t.Fatal(err)
		}
		expectCode(t, b.Check(t.Context(), req), endpoint.CodeDiffers, strings.Split(s, "/")[3])
	}
	if mended, err := b.Repair(t.Context()); err != nil || len(mended) != 2 {
		t.Errorf("mended %q, %v", mended, err)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
}

// ADD says why it cannot, and leaves nothing; so does a process that ends
// anywhere.
func TestSendLimitedUndone(t *testing.T) {
	b := newBench(t)
	b.fakes.Clsact = true
	for _, call := range []string{"wire", "attach", "up"} {
		req, _ := b.request("web")
		req.SendLimited = true
		b.fakes.Hook = func(_ context.Context, c string, _ endpoint.Endpoint) error {
			if c == call {
				return errors.New("broken on purpose")
			}
			return nil
		}
		_, err := b.Add(t.Context(), req)
		expectCode(t, err, endpoint.CodeInternal, "broken on purpose")
		b.fakes.Hook = nil
		b.expectNothing()
	}
	for _, step := range []string{"created", "attached", "host configured"} {
		req, _ := b.request("web")
		req.SendLimited = true
		if !b.crash(step, func() error { _, err := b.Add(context.Background(), req); return err }) {
			t.Fatal("the step was not reached")
		}
		if err := b.restart(); err != nil {
			t.Error(err)
		}
		b.expectNothing()
	}
	// The state is lost: the addresses that are routed to the device over it are
	// not given away.
	req, _ := b.request("web", "10.244.80.65")
	req.SendLimited = true
	b.add(req)
	if err := os.Remove(filepath.Join(b.state, "endpoints", "c-web:eth0.json")); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err == nil {
		t.Error("lost state is not reported")
	}
	other, _ := b.request("other", "10.244.80.65")
	_, err := b.Add(t.Context(), other)
	expectCode(t, err, endpoint.CodeAddress, "10.244.80.65")
}
