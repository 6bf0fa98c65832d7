package endpoint_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podweir/podweir/internal/endpoint"
)

// GC is about what there is when it is asked for: neither an addition under
// way, nor what a runtime makes anew meanwhile.
func TestGCLeavesWhatComesMeanwhile(t *testing.T) {
	b := newBench(t)
	var reqs [2]endpoint.Request
	for i := range reqs {
		reqs[i], _ = b.request(fmt.Sprintf("pod-%d", i))
		b.add(reqs[i])
	}
	again := -1
	b.fakes.Hook = func(_ context.Context, call string, ep endpoint.Endpoint) error {
		if call != "down" || again >= 0 {
			return nil
		}
		again = 0
		if ep.Pod == "pod-0" {
			again = 1
		}
		b.del(reqs[again])
		b.add(reqs[again])
		return nil
	}
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	b.fakes.Hook = nil
	if got := b.List(); len(got) != 1 || got[0].Key() != reqs[again].Key() {
		t.Errorf("endpoints: %v, want that of %v", got, reqs[again].Key())
	}
	b.del(reqs[again])
	b.expectNothing()

	b.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		if call == "attach" || call == "up" {
			return b.GC(ctx, "", nil)
		}
		return nil
	}
	b.add(reqs[0])
	b.fakes.Hook = nil
	if err := b.Check(t.Context(), reqs[0]); err != nil {
		t.Error(err)
	}
	b.del(reqs[0])
	b.expectNothing()
}

// An interface whose state is lost keeps its addresses until it is gone: then
// GC gives them back.
func TestGCForgetsInterfacesWithoutState(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("lost")
	ep := b.add(req)
	if err := os.Remove(filepath.Join(b.state, "endpoints", "c-lost:eth0.json")); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err == nil || !strings.Contains(err.Error(), ep.HostIfName) {
		t.Errorf("Restore reports %v", err)
	}
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	if _, held := b.ipam.Owner(ep.Addrs[0]); !held {
		t.Errorf("%s would be given away while the host routes it to %s", ep.Addrs[0], ep.HostIfName)
	}
	b.deleteLinks()
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	if owner, held := b.ipam.Owner(ep.Addrs[0]); held {
		t.Errorf("%s is held by %s still", ep.Addrs[0], owner)
	}
}

func TestGC(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("stale")
	b.add(req)
	kept, _ := b.request("kept")
	b.add(kept)
	other, _ := b.request("other")
	other.Network = "other"
	b.add(other)
	if err := b.GC(t.Context(), "", []endpoint.Key{kept.Key(), {ContainerID: "unknown", IfName: "eth0"}}); err != nil {
		t.Fatal(err)
	}
	if got := b.List(); len(got) != 2 || got[0].Pod != "kept" || got[1].Pod != "other" {
		t.Errorf("endpoints: %v", got)
	}
	for _, network := range []string{"", "other"} {
		if err := b.GC(t.Context(), network, nil); err != nil {
			t.Fatal(err)
		}
	}
	b.expectNothing()
}
