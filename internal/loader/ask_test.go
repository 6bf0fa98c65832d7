package loader

import (
	"context"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

// The program that answers questions is there for other processes, over the
// maps in force and with the settings of the last load.
func TestAskIsPinned(t *testing.T) {
	cfg := Config{BPFFS: bpffs(t), FlowsMax: 1024, FlowsNewMax: 1024}
	first, second := veth(t, "pwone"), veth(t, "pwtwo")
	question := maps.Ask{Key: maps.FlowKey{
		Src: maps.ToAddr(netip.MustParseAddr("203.0.113.9")), Dst: maps.ToAddr(netip.MustParseAddr("10.244.0.5")),
		Dport: 80, Proto: maps.ProtoTCP,
	}}
	check := func(what string, device int, table uint32) {
		t.Helper()
		a, err := maps.OpenAsker(filepath.Join(cfg.BPFFS, "programs"))
		must(t, err)
		defer a.Close()
		got, err := a.Ask(question)
		must(t, err)
		if got.Device != uint32(device) || got.Ingress.Table != table {
			t.Fatalf("%s: routes as from device %d, table %d; want %d, %d", what, got.Device, got.Ingress.Table, device, table)
		}
	}
	d := load(t, cfg)
	check("loaded", 0, 0)
	must(t, d.Maps().Endpoints.Put(question.Key.Dst, maps.Endpoint{Ifindex: uint32(first), PolicyIn: 7}))
	check("with an endpoint", 0, 7)
	must(t, d.SetOverlay(context.Background(), first))
	check("with another tunnel device", first, 7)
	must(t, d.Close())
	check("without the process", first, 7)
	cfg.OverlayIfindex = second
	load(t, cfg)
	check("loaded again", second, 7)
	if got := ls(t, programsDir(cfg.BPFFS)); len(got) != 1 {
		t.Fatalf("pinned %q, want one program", got)
	}
}
