package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/health"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/service"
)

// errFormerBackends is wrapped by errors about a port whose new backends
// found no place.
var errFormerBackends = errors.New("keeps its former backends")

// checks are the health checks that services ask for.
type checks struct {
	servers *health.Checks
	want    map[types.NamespacedName]health.Check
	dirty   bool // want changed, or a port could not be had
	addrs   []netip.Addr
	failed  map[types.NamespacedName]error
}

func newChecks(p *health.Proxy) checks {
	return checks{servers: health.NewChecks(p.Healthy), want: make(map[types.NamespacedName]health.Check)}
}

// beginRound tells the health of the round that comes. Before all objects are
// known there is nothing to apply.
func (a *Agent) beginRound() (full bool) {
	if a.synced {
		a.health.Began()
	}
	return !a.full
}

func (a *Agent) endRound(full bool) {
	if a.synced {
		a.health.Applied(full, a.behind())
	}
}

// behind is an error while the maps do not hold every service as compiled.
// What is wrong with an object is none of it.
func (a *Agent) behind() error {
	s := a.services
	entries := len(s.frontends.Failed()) + len(s.states.Failed()) + len(s.ranges.Failed())
	if entries == 0 && len(a.unwritten) == 0 {
		return nil
	}
	return fmt.Errorf("%d entries and the backends of %d services are not written", entries, len(a.unwritten))
}

func (a *Agent) noteUnwritten(o service.Owner, err error) {
	if errors.Is(err, errFormerBackends) {
		a.unwritten[o] = struct{}{}
	}
}

// wantChecks notes what the services of a batch ask for.
func (a *Agent) wantChecks(batch map[service.Owner]service.Compiled) {
	for o, c := range batch {
		if o.Kind != service.KindService {
			continue
		}
		name := types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
		was, had := a.checks.want[name]
		switch {
		case c.Health == nil && had:
			delete(a.checks.want, name)
			a.checks.dirty = true
		case c.Health != nil:
			check := health.Check{Port: c.Health.NodePort, Local: c.Health.LocalEndpoints}
			a.checks.dirty = a.checks.dirty || !had || was != check
			a.checks.want[name] = check
		}
	}
}

// checkAddrs are the addresses to listen on: those that NodePorts answer on.
// None = all.
func (a *Agent) checkAddrs() []netip.Addr {
	if n := a.opt.NodePortAddrs; !n.Primary && len(n.In) == 0 {
		return nil
	}
	var out []netip.Addr
	for _, addr := range a.world.in.tunnel.HostAddrs {
		if a.world.in.tunnel.Addrs[addr].Flags&maps.PeerNodePort != 0 {
			out = append(out, addr)
		}
	}
	return out
}

// syncChecks makes the servers as they are wanted. A port that is not to be
// had is tried again in every round, and there is one every verifyEvery.
func (a *Agent) syncChecks() {
	addrs := a.checkAddrs()
	if !a.checks.dirty && !a.checks.servers.Lost() && slices.Equal(addrs, a.checks.addrs) {
		return
	}
	for name := range a.checks.failed {
		a.problem(checkProblem(name), "", nil)
	}
	a.checks.addrs = addrs
	a.checks.failed = a.checks.servers.Sync(a.checks.want, addrs)
	for name, err := range a.checks.failed {
		a.problem(checkProblem(name), "Service "+name.String(), err)
	}
	a.checks.dirty = len(a.checks.failed) > 0
}

func checkProblem(name types.NamespacedName) string {
	return "health check of Service " + name.String()
}

// noLocal counts the service ports that a Local policy leaves without
// endpoints on this node, from the frontends as they are written.
func (a *Agent) noLocal() []health.NoLocal {
	type kind struct {
		family   corev1.IPFamily
		external bool
	}
	ports := make(map[kind]map[uint32]struct{})
	for _, f := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		ports[kind{f, false}], ports[kind{f, true}] = make(map[uint32]struct{}), make(map[uint32]struct{})
	}
	ctx, cancel := context.WithTimeout(context.Background(), doTimeout)
	defer cancel()
	err := a.do(ctx, func() {
		all := a.services.frontends.All()
		// The cluster IP says of which family the others are: the key of a
		// NodePort has no address.
		families := make(map[uint32]corev1.IPFamily)
		for k, v := range all {
			if v.Flags&(maps.ServiceExternal|maps.ServiceAddrOwned) == 0 {
				families[v.Id] = corev1.IPv6Protocol
				if maps.FromAddr(k.Addr).Is4() {
					families[v.Id] = corev1.IPv4Protocol
				}
			}
		}
		for _, v := range all {
			family, known := families[v.Id]
			if !known {
				continue
			}
			if v.Flags&maps.ServiceExternal == 0 && v.Flags&maps.ServiceNoLocal != 0 {
				ports[kind{family, false}][v.Id] = struct{}{}
			}
			if v.Flags&maps.ServiceExternal != 0 && v.Flags&maps.ServiceNoLocalExt != 0 {
				ports[kind{family, true}][v.Id] = struct{}{}
			}
		}
	})
	if err != nil {
		return nil // podweir_scrape_error says so
	}
	out := make([]health.NoLocal, 0, len(ports))
	for k, ids := range ports {
		out = append(out, health.NoLocal{Family: k.family, External: k.external, Count: len(ids)})
	}
	return out
}
