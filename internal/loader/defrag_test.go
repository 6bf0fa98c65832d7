package loader

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf/link"
)

// reassembly are the kernel's netfilter links that ask for reassembly in this
// or another namespace.
func reassembly(t *testing.T) (ids []link.ID) {
	t.Helper()
	it := new(link.Iterator)
	defer it.Close()
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil {
			continue // gone meanwhile
		}
		if info.Type == link.NetfilterType {
			ids = append(ids, info.ID)
		}
	}
	must(t, it.Err())
	return ids
}

// pinnedIDs are the kernel's numbers of our links.
func pinnedIDs(t *testing.T, cfg Config) (ids []link.ID) {
	t.Helper()
	for name := range defragFamilies() {
		l, err := link.LoadPinnedLink(filepath.Join(linksDir(cfg.BPFFS), name), nil)
		must(t, err)
		info, err := l.Info()
		must(t, err)
		ids = append(ids, info.ID)
		must(t, l.Close())
	}
	return ids
}

// The links for the reassembly of fragments outlive the process, are there
// once whatever the number of restarts, pinned again, and go with the rest.
func TestDefragLinks(t *testing.T) {
	ctx := context.Background()
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	d := load(t, cfg)
	if !d.cfg.Defrag {
		t.Skip("this kernel reassembles nothing for us")
	}
	old := pinnedIDs(t, cfg)
	must(t, d.Close())
	alive := reassembly(t)
	for _, id := range old {
		if !slices.Contains(alive, id) {
			t.Fatalf("link %d ended with the process", id)
		}
	}
	d = load(t, cfg)
	must(t, os.Remove(filepath.Join(linksDir(cfg.BPFFS), "defrag-6")))
	repaired, err := d.Verify(ctx)
	if err != nil || len(repaired) != 1 {
		t.Fatalf("repaired %q, %v", repaired, err)
	}
	now := pinnedIDs(t, cfg)
	must(t, d.Close())
	must(t, Cleanup(cfg.BPFFS))
	for alive = reassembly(t); ; alive = reassembly(t) {
		left := slices.DeleteFunc(slices.Clone(alive), func(id link.ID) bool {
			return !slices.Contains(old, id) && !slices.Contains(now, id)
		})
		if len(left) == 0 {
			return
		}
		if t.Context().Err() != nil {
			t.Fatalf("links %v are left", left)
		}
	}
}
