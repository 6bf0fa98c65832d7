package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/health"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/service"
	"github.com/podweir/podweir/internal/table"
)

// errFormerBackends is wrapped by errors about a port whose new backends
// found no place.
var errFormerBackends = errors.New("keeps its former backends")

// checks are the health checks that services ask for.
type checks struct {
	servers *health.Checks
	want    map[types.NamespacedName]health.Check
	dirty   bool // want changed, or a port could not be had
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
	frontends := len(a.services.frontends.Failed())
	if frontends == 0 && len(a.unwritten) == 0 {
		return nil
	}
	return fmt.Errorf("%d frontends and the backends of %d services are not written", frontends, len(a.unwritten))
}

func (a *Agent) noteUnwritten(name types.NamespacedName, err error) {
	if errors.Is(err, errFormerBackends) {
		a.unwritten[name] = struct{}{}
	}
}

// wantChecks notes what the services of a batch ask for.
func (a *Agent) wantChecks(txn statedb.ReadTxn, batch map[types.NamespacedName]service.Compiled) {
	for name, c := range batch {
		was, had := a.checks.want[name]
		check, ok := a.checkOf(txn, name, c)
		switch {
		case ok && (!had || was != check):
			a.checks.want[name], a.checks.dirty = check, true
		case !ok && had:
			delete(a.checks.want, name)
			a.checks.dirty = true
		}
	}
}

// checkOf is the health check that a service asks for: LoadBalancer with the
// external traffic policy Local. As kube-proxy does, endpoints are counted by
// address and in the service's first family.
func (a *Agent) checkOf(txn statedb.ReadTxn, name types.NamespacedName, c service.Compiled) (health.Check, bool) {
	svc, _, ok := a.tables.Services.Get(txn, table.ByName[*corev1.Service](name.Namespace, name.Name))
	if !ok || c.Name == "" || len(c.Addrs) == 0 || svc.Spec.Type != corev1.ServiceTypeLoadBalancer ||
		svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return health.Check{}, false
	}
	port := svc.Spec.HealthCheckNodePort
	if port < 1 || port > 65535 {
		return health.Check{}, false
	}
	family := discoveryv1.AddressTypeIPv4
	if c.Addrs[0].Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	ready := make(map[string]struct{})
	for s := range a.tables.Slices.List(txn, table.SlicesByService(name.Namespace, name.Name)) {
		if s.AddressType != family {
			continue
		}
		for _, e := range s.Endpoints {
			isReady := svc.Spec.PublishNotReadyAddresses || e.Conditions.Ready == nil || *e.Conditions.Ready
			if isReady && e.NodeName != nil && *e.NodeName == a.opt.NodeName && len(e.Addresses) > 0 {
				ready[e.Addresses[0]] = struct{}{}
			}
		}
	}
	return health.Check{Port: uint16(port), Local: len(ready)}, true
}

// syncChecks makes the servers as they are wanted. A port that is not to be
// had is tried again in every round, and there is one every verifyEvery.
func (a *Agent) syncChecks() {
	if !a.checks.dirty && !a.checks.servers.Lost() {
		return
	}
	for name := range a.checks.failed {
		a.problem(checkProblem(name), "", nil)
	}
	a.checks.failed = a.checks.servers.Sync(a.checks.want, nil)
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
