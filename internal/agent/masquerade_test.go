package agent

import (
	"slices"
	"testing"

	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/sourceport"
)

// What the host takes for itself is not given away, also when it changes; when
// nothing is left that is said.
func TestSourcePortsFollow(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.await("settings", func() bool { b.a.opt.NodePorts = service.PortRange{Min: 30000, Max: 32767}; return true })
	b.done()
	b.await("ready", func() bool { return b.a.full })
	for _, tt := range []struct {
		local sourceport.Range
		want  []sourceport.Range
		short bool
	}{
		{sourceport.Range{Min: 32768, Max: 60999}, []sourceport.Range{{Min: 1024, Max: 29999}, {Min: 61000, Max: 65535}}, false},
		{sourceport.Range{Min: 15000, Max: 60999}, []sourceport.Range{{Min: 1024, Max: 14999}, {Min: 61000, Max: 65535}}, false},
		{sourceport.Range{Min: 1024, Max: 65535}, []sourceport.Range{{Min: 1024, Max: 29999}, {Min: 32768, Max: 65535}}, true},
	} {
		b.stack.mu.Lock()
		b.stack.local = tt.local
		b.stack.mu.Unlock()
		b.stack.events <- struct{}{}
		b.await("the programs' ports", func() bool {
			b.dp.mu.Lock()
			defer b.dp.mu.Unlock()
			return slices.Equal(b.dp.ports, tt.want) && slices.Equal(b.a.world.ports, tt.want) && len(b.a.problems["source ports"]) > 0 == tt.short
		})
	}
	if got := b.a.masquerade().String(); got != "IPv4 and IPv6; source ports 1024-29999, 32768-65535" {
		t.Errorf("told as %q", got)
	}
	// Ports that were named are taken, and what is wrong with them is said.
	m := Masquerade{Ports: []sourceport.Range{{Min: 2000, Max: 29999}}}
	for local, short := range map[sourceport.Range]bool{{Min: 32768, Max: 60999}: false, {Min: 20000, Max: 60999}: true} {
		if got, shortage, err := m.chosen(b.a.opt.NodePorts, local); !slices.Equal(got, m.Ports) || (shortage != nil) != short || err != nil {
			t.Errorf("ports that were named, beside the host's %v: %v, %v, %v", local, got, shortage, err)
		}
	}
}
