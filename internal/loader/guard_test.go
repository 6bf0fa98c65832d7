package loader

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
)

// guardLinks are the ids of the guard's links, by pin.
func guardLinks(t *testing.T, cfg Config) map[string]link.ID {
	t.Helper()
	out := make(map[string]link.ID)
	for _, name := range ls(t, linksDir(cfg.BPFFS)) {
		if !isGuardPin(name) {
			continue
		}
		l, err := link.LoadPinnedLink(filepath.Join(linksDir(cfg.BPFFS), name), nil)
		must(t, err)
		info, err := l.Info()
		must(t, err)
		out[name] = info.ID
		must(t, l.Close())
	}
	return out
}

// It is attached when the programs are, outlives the process, is left alone by
// the next one, comes back when it is gone, and goes first.
func TestGuard(t *testing.T) {
	if err := features.HaveProgramType(ebpf.Netfilter); err != nil {
		t.Skipf("this kernel has no netfilter programs: %v", err)
	}
	modes(t, func(t *testing.T, cfg Config) {
		d := load(t, cfg)
		if got := guardLinks(t, cfg); len(got) != 0 {
			t.Fatalf("links before the pods' programs are in place: %v", got)
		}
		quiet := func() {
			t.Helper()
			repaired, err := d.Verify(t.Context())
			must(t, err)
			if len(repaired) != 0 {
				t.Errorf("repaired: %v", repaired)
			}
		}
		quiet()
		first := guardLinks(t, cfg)
		if len(first) != 2 {
			t.Fatalf("links: %v", first)
		}
		same := func() {
			t.Helper()
			for name, id := range guardLinks(t, cfg) {
				if id != first[name] {
					t.Errorf("%s is link %d, was %d", name, id, first[name])
				}
			}
		}
		quiet()
		same()
		d = restart(t, d)
		same()
		quiet()
		same()

		// Detached, and not pinned any more.
		must(t, dropPin(filepath.Join(linksDir(cfg.BPFFS), guardPin4)))
		must(t, os.Remove(filepath.Join(linksDir(cfg.BPFFS), guardPin6)))
		repaired, err := d.Verify(t.Context())
		must(t, err)
		if len(repaired) != 2 || !strings.Contains(repaired[0], guardPin4) || !strings.Contains(repaired[1], guardPin6) {
			t.Errorf("repaired: %v", repaired)
		}
		if got := guardLinks(t, cfg); len(got) != 2 || got[guardPin4] == first[guardPin4] || got[guardPin6] == first[guardPin6] {
			t.Errorf("links: %v, were %v", got, first)
		}
		quiet()

		// A program of another version: the next takes the other priority.
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R0, 1), asm.Return(), // NF_ACCEPT
		}})
		must(t, err)
		defer p.Close()
		must(t, d.attachGuard(guardPin4, link.NetfilterProtoIPv4, p))
		between := guardLinks(t, cfg)
		repaired, err = d.Verify(t.Context())
		must(t, err)
		if len(repaired) != 1 || !strings.Contains(repaired[0], "another version") {
			t.Errorf("repaired: %v", repaired)
		}
		if got := guardLinks(t, cfg); got[guardPin4] == between[guardPin4] || got[guardPin6] != between[guardPin6] {
			t.Errorf("links: %v, were %v", got, between)
		}
		must(t, d.Close())
		must(t, Cleanup(cfg.BPFFS))
		if _, err := os.Stat(linksDir(cfg.BPFFS)); !os.IsNotExist(err) {
			t.Errorf("left behind: %v", err)
		}
	})
}
