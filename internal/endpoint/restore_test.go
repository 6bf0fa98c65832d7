package endpoint_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/endpoint"
)

func TestRestartKeepsEndpoints(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web")
	ep := b.add(req)
	b.fakes.Calls()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b.open()
	if got := b.List(); len(got) != 1 || fmt.Sprint(got[0]) != fmt.Sprint(ep) || got[0].MAC.String() != ep.MAC.String() ||
		got[0].HostMAC.String() != ep.HostMAC.String() || !slices.Equal(got[0].Addrs, ep.Addrs) || got[0].ID != ep.ID {
		t.Errorf("before Restore the list is %+v, want %+v", got, ep)
	}
	if calls := b.fakes.Calls(); len(calls) > 0 {
		t.Errorf("New called %v", calls)
	}
	expectCode(t, b.Status(), endpoint.CodeNotAvailable, "starting")

	// An Add that comes too early waits.
	other, _ := b.request("other")
	expired, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := b.Add(expired, other)
	expectCode(t, err, endpoint.CodeTryAgain, "starting")
	waiting := make(chan error, 1)
	go func() { _, err := b.Add(context.Background(), other); waiting <- err }()

	if err := b.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err != nil {
		t.Fatal(err)
	}
	if err := b.Status(); err != nil {
		t.Error(err)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	b.expectTraffic(ns, ep)
	if got := b.List()[1]; got.ID <= ep.ID || got.Addrs[0] == ep.Addrs[0] {
		t.Errorf("after a restart %s got id %d and %v", got, got.ID, got.Addrs)
	}
	b.del(req)
	b.del(other)
	b.expectNothing()
}

func TestEndpointsAreRemovedAfterAReboot(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("gone")
	b.add(req)
	kept, ns := b.request("kept")
	ep := b.add(kept)
	link, err := netlink.LinkByName(b.List()[0].HostIfName)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(link); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err != nil {
		t.Error(err)
	}
	if got := b.List(); len(got) != 1 || got[0].Pod != "kept" {
		t.Errorf("endpoints: %v", got)
	}
	b.expectTraffic(ns, ep)
	b.del(req)
	b.del(kept)
	b.expectNothing()
}

// A reboot counts interfaces anew: the index of a record's interface may be
// another device's, whose programs are none of the record's.
func TestRecordWhoseIndexIsAnothersByNow(t *testing.T) {
	b := newBench(t)
	gone, _ := b.request("gone")
	goneEp := b.add(gone)
	kept, ns := b.request("kept")
	keptEp := b.add(kept)
	link, err := netlink.LinkByName(goneEp.HostIfName)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(b.state, "endpoints", "c-gone:eth0.json")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	index := func(i int) string { return fmt.Sprintf(`"hostIfindex": %d`, i) }
	moved := strings.Replace(string(content), index(goneEp.HostIfindex), index(keptEp.HostIfindex), 1)
	if err := os.WriteFile(file, []byte(moved), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err != nil {
		t.Error(err)
	}
	if got := b.List(); len(got) != 1 || got[0].Pod != "kept" {
		t.Errorf("endpoints: %v", got)
	}
	if err := b.fakes.Attached(t.Context(), keptEp.HostIfindex); err != nil {
		t.Errorf("programs of the other pod: %v", err)
	}
	b.expectTraffic(ns, keptEp)
}

func TestCorruptedFileIsSetAside(t *testing.T) {
	b := newBench(t)
	bad, _ := b.request("bad")
	good, ns := b.request("good")
	badEp := b.add(bad)
	goodEp := b.add(good)
	file := filepath.Join(b.state, "endpoints", "c-bad:eth0.json")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	goodContent, err := os.ReadFile(filepath.Join(b.state, "endpoints", "c-good:eth0.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, data string }{
		{"empty", ""},
		{"cut", string(content[:len(content)/2])},
		{"noise", "\x00\xff\x00"},
		{"other key", strings.ReplaceAll(string(content), "c-bad", "c-other")},
		{"version", strings.Replace(string(content), `"version": 1`, `"version": 7`, 1)},
		{"another's interface", strings.Replace(string(content), badEp.HostIfName, goodEp.HostIfName, 1)},
		{"no interface of ours", strings.Replace(string(content), badEp.HostIfName, "eth0", 1)},
		{"no address", strings.Replace(string(content), badEp.Addrs[0].String(), "", 1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(c.data), 0o600); err != nil {
				t.Fatal(err)
			}
			half := filepath.Join(b.state, "endpoints", ".tmp-123")
			if err := os.WriteFile(half, content[:10], 0o600); err != nil {
				t.Fatal(err)
			}
			err := b.restart()
			if err == nil || !strings.Contains(err.Error(), "c-bad") || !strings.Contains(err.Error(), badEp.HostIfName) {
				t.Errorf("Restore reports %v", err)
			}
			if got := b.List(); len(got) != 1 || got[0].Pod != "good" {
				t.Fatalf("endpoints: %v", got)
			}
			b.expectTraffic(ns, goodEp)
			if got := b.files(); len(got) != 1 {
				t.Errorf("files: %v", got)
			}
			if _, err := os.Stat(filepath.Join(b.state, "corrupt", "c-bad:eth0.json")); err != nil {
				t.Error(err)
			}
			// The lost pod's addresses are still routed to it.
			wants, _ := b.request("wants", badEp.Addrs[0].String())
			_, err = b.Add(t.Context(), wants)
			expectCode(t, err, endpoint.CodeAddress, badEp.HostIfName)
		})
	}
	// Its DEL, which names the pod, removes the interface and frees them.
	b.del(bad)
	wants, _ := b.request("wants", badEp.Addrs[0].String())
	b.add(wants)
	b.del(wants)

	// Two files that claim one interface: one of them wins.
	twice := strings.ReplaceAll(string(goodContent), "c-good", "c-bad")
	if err := os.WriteFile(file, []byte(twice), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err == nil || !strings.Contains(err.Error(), goodEp.HostIfName) {
		t.Errorf("Restore reports %v", err)
	}
	b.expectTraffic(ns, goodEp)
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	for _, l := range hostLinks(t) {
		t.Errorf("%s is left", l.Attrs().Name)
	}
}
