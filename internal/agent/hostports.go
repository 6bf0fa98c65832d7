package agent

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/service"
)

// hostPorts are the ports of this node that lead to its pods, as the plugin
// asked for them. They are written with the services.
type hostPorts struct {
	want    map[service.Owner]service.Compiled
	invalid map[service.Owner]error // what of it cannot be served
	changed map[service.Owner]struct{}
	retry   map[service.Owner]time.Time
	failed  map[service.Owner]error // what was not written
}

func newHostPorts() hostPorts {
	return hostPorts{
		want:    make(map[service.Owner]service.Compiled),
		invalid: make(map[service.Owner]error),
		changed: make(map[service.Owner]struct{}),
		retry:   make(map[service.Owner]time.Time),
		failed:  make(map[service.Owner]error),
	}
}

func podPorts(addrs []netip.Addr, list []endpoint.PortMapping) service.PodPorts {
	out := service.PodPorts{Addrs: addrs}
	for _, m := range list {
		out.Ports = append(out.Ports, service.PortMapping{
			HostIP: m.HostIP, Port: m.HostPort, Target: m.ContainerPort, Protocol: corev1.Protocol(m.Protocol),
		})
	}
	return out
}

// hostPortAddrs are the addresses of this node that host ports answer on, in
// order: those that services may have are left to them, also where a device
// of the node has them.
func hostPortAddrs(in peerInput, serviceCIDRs []netip.Prefix) (out []netip.Addr) {
	for _, a := range in.tunnel.HostAddrs {
		if !slices.ContainsFunc(serviceCIDRs, func(r netip.Prefix) bool { return r.Contains(a) }) {
			out = append(out, a)
		}
	}
	return out
}

// compileHostPorts compiles those of all endpoints and notes what changed:
// endpoints, or addresses of the node.
func (a *Agent) compileHostPorts() {
	w, h := &a.world, &a.ports
	node := hostPortAddrs(w.in, w.cidrs)
	seen := make(map[service.Owner]bool, len(w.local.ports))
	for name, list := range w.local.ports {
		o := service.Pod(name.Namespace, name.Name)
		seen[o] = true
		c, err := service.CompileHostPorts(o, w.local.pods[name].CreationTimestamp.Time, list, node, !a.opt.NoSockets)
		if old, ok := h.want[o]; ok && reflect.DeepEqual(old, c) && sameError(h.invalid[o], err) {
			continue
		}
		h.want[o], h.invalid[o] = c, err
		h.changed[o] = struct{}{}
	}
	for o := range h.want {
		if !seen[o] {
			delete(h.want, o)
			delete(h.invalid, o)
			h.changed[o] = struct{}{}
		}
	}
}

func sameError(a, b error) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Error() == b.Error()
}

// dirtyHostPorts are the pods to be written now.
func (a *Agent) dirtyHostPorts(now time.Time) map[service.Owner]service.Compiled {
	h := &a.ports
	for o, at := range h.retry {
		if !now.Before(at) {
			h.changed[o] = struct{}{}
		}
	}
	batch := make(map[service.Owner]service.Compiled, len(h.changed))
	for o := range h.changed {
		batch[o] = h.want[o] // zero: it has gone
		delete(h.retry, o)
		delete(h.failed, o)
		delete(a.unwritten, o)
		a.problem(o.String(), o.String(), h.invalid[o])
	}
	clear(h.changed)
	return batch
}

// hostPortsInForce says why those of a pod are not as the loop wants them.
// What an address or a port lacks that somebody else has is a problem, not a
// reason to keep the pod from starting.
func (a *Agent) hostPortsInForce(pod types.NamespacedName) error {
	err := a.ports.failed[service.Pod(pod.Namespace, pod.Name)]
	if onlyTaken(err) {
		return nil
	}
	return err
}

// onlyTaken: nothing but frontends that are another owner's.
func onlyTaken(err error) bool {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(joined.Unwrap(), func(e error) bool { return !onlyTaken(e) })
	}
	return err == nil || errors.Is(err, errTaken)
}
