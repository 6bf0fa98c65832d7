package agent

import (
	"context"
	"net/netip"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/sourceport"
)

// Masquerade says under which addresses and ports pods reach the world. The
// zero value: under this node's, by the ports that nobody else wants.
type Masquerade struct {
	Off4, Off6 bool               // under their own, of that family
	Except     []netip.Prefix     // under their own to these, see [tunnel.CheckPlain]
	Ports      []sourceport.Range // of flows whose source is translated; none = all that may be
}

// chosen are the ports that sources are translated to. shortage says what is
// wrong with them.
func (m Masquerade) chosen(nodePorts service.PortRange, local sourceport.Range) (ports []sourceport.Range, shortage, err error) {
	if len(m.Ports) > 0 {
		return m.Ports, sourceport.CheckLocal(m.Ports, local), nil
	}
	return sourceport.Choose(sourceport.Range(nodePorts), local)
}

// syncSourcePorts follows net.ipv4.ip_local_port_range: what the host takes for
// itself is not given away. Running flows keep their ports.
func (a *Agent) syncSourcePorts(ctx context.Context) {
	local, err := a.stack.LocalPorts()
	a.problem("the host's own ports", "", err)
	if err != nil {
		return // keep what was known; the next tick reads it again
	}
	ports, shortage, err := a.opt.Masquerade.chosen(a.opt.NodePorts, local)
	if err == nil {
		err = a.dp.SetSourcePorts(ctx, ports)
	}
	if err == nil {
		a.world.ports, err = ports, shortage
	}
	a.problem("source ports", "", err)
}

// masquerade is what the command shows.
func (a *Agent) masquerade() api.Masquerade {
	m := a.opt.Masquerade
	out := api.Masquerade{IPv4: !m.Off4, IPv6: !m.Off6, Except: m.Except}
	for _, r := range a.world.ports {
		out.SourcePorts = append(out.SourcePorts, r.String())
	}
	return out
}
