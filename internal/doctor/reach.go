package doctor

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/podweir/podweir/internal/api"
)

// checkPods looks at the way from this host to its own pods, which the
// kubelet's probes take, and what pods send each other does not depend on; and
// at both ends of their interfaces, which everything depends on. What differs
// there may be as somebody in the pod wants it.
func checkPods(ctx context.Context, f Facts) (out []Finding) {
	if f.Endpoints == nil {
		return []Finding{{State: Warn, Text: "the agent is not there to say which pods there are"}}
	}
	const wayOut = "the agent mends it within ten seconds; if it does not, podweir status says why"
	devices, err := f.Host.Devices()
	if err != nil {
		return []Finding{{State: Warn, Text: err.Error()}}
	}
	for _, ep := range f.Endpoints.Endpoints {
		object := "Pod " + ep.Namespace + "/" + ep.Pod
		if _, there := devices[ep.HostIfName]; !there {
			out = append(out, Finding{State: Fail, Object: object, WayOut: "delete the pod, so that it is plugged again",
				Text: fmt.Sprintf("its interface %s is gone: nobody reaches %s", ep.HostIfName, addrs(ep.Addrs))})
			continue
		}
		before := len(out)
		for _, a := range ep.Addrs {
			device, err := f.Host.Route(a)
			switch {
			case err != nil:
				out = append(out, Finding{State: Fail, Object: object, WayOut: wayOut,
					Text: fmt.Sprintf("there is no route to its address %s (%v): this host, the kubelet's probes with it, does not reach the pod", a, err)})
			case device != ep.HostIfName:
				out = append(out, Finding{State: Fail, Object: object, WayOut: wayOut + "; ip route get " + a.String() + " shows whose it is",
					Text: fmt.Sprintf("the route to its address %s leads to %s and not to its interface %s: this host, the kubelet's probes with it, does not reach the pod", a, device, ep.HostIfName)})
			}
		}
		if len(out) > before || f.Plugged == nil {
			continue
		}
		if err := f.Plugged(ctx, ep); err != nil {
			out = append(out, Finding{State: Warn, Object: object, Text: fmt.Sprintf("its interface: %v", err),
				WayOut: "what of it is the host's the agent mends within ten seconds; for what is the pod's, ask who changed it there, or delete the pod, so that it is plugged again"})
		}
	}
	return out
}

// checkPolicy names what policy denied just now: that may be as it should be.
func checkPolicy(_ context.Context, f Facts) (out []Finding) {
	if f.Status == nil {
		return []Finding{{State: Warn, Text: "the agent is not there to say what is denied"}}
	}
	const most = 10
	seen := map[string]bool{}
	for _, ev := range f.Denials {
		d := ev.Denied
		if d == nil {
			continue
		}
		end := func(e api.EventEnd) string {
			if e.Pod != "" {
				return e.Pod
			}
			return e.Addr.String()
		}
		x := Finding{State: Warn, Object: "Pod " + d.Pod,
			Text: fmt.Sprintf("its %s policy denies %s to %s by %s, port %d: %s", d.Direction, end(d.Source), end(d.Destination), ev.Protocol, d.Destination.Port, ev.Text)}
		if seen[x.Object+x.Text] {
			continue
		}
		seen[x.Object+x.Text] = true
		if len(seen) > most {
			continue
		}
		x.WayOut = fmt.Sprintf("if it should pass: podweir policy %s shows the rules, podweir policy ask which one decides", d.Pod)
		out = append(out, x)
	}
	if n := len(seen) - most; n > 0 {
		out = append(out, Finding{State: Warn, Text: fmt.Sprintf("and %d more are denied: podweir monitor --reason policy", n)})
	}
	return out
}

// ServiceName is namespace/name:port.
func ServiceName(s api.Service) string {
	name := s.Namespace + "/" + s.Name
	if s.Port != "" {
		name += ":" + s.Port
	}
	return name
}

// why says where the endpoints of a service are lost.
func why(s api.Service) string {
	switch {
	case s.Slices == 0:
		return "it has no EndpointSlice of that family"
	case s.Endpoints == 0:
		return "its EndpointSlices name none"
	}
	return fmt.Sprintf("of the %d in its EndpointSlices none is ready, none serves while it terminates, or none has that port", s.Endpoints)
}

// checkServices names what is refused for want of endpoints, which is nothing
// of the node's, and may be as it should be; and what the datapath has lost.
func checkServices(_ context.Context, f Facts) (out []Finding) {
	if f.Services == nil {
		return []Finding{{State: Warn, Text: "the agent is not there to say which services there are"}}
	}
	const most = 10
	for _, name := range slices.Sorted(maps.Keys(f.Missing)) {
		var at []string
		for _, a := range f.Missing[name] {
			at = append(at, a.String())
		}
		out = append(out, Finding{State: Fail, Object: name,
			Text:   "the datapath does not have " + strings.Join(at, ", ") + ": what is sent there is nobody's",
			WayOut: "who else writes to pw_services? The agent puts it back when it is started anew"})
	}
	empty := map[string]bool{}
	for _, s := range f.Services.Services {
		name := ServiceName(s)
		if s.Kind == "Pod" || len(s.Frontends) == 0 || len(s.Backends)+len(s.External) > 0 || empty[name] {
			continue
		}
		empty[name] = true
		if len(empty) > most {
			continue
		}
		out = append(out, Finding{State: Warn, Object: "Service " + name,
			Text:   "has no usable endpoint: " + why(s) + ". Connections to it are refused",
			WayOut: fmt.Sprintf("do its selector and targetPort lead to pods that are ready? kubectl -n %s get endpointslices -l kubernetes.io/service-name=%s -o yaml", s.Namespace, s.Name)})
	}
	if n := len(empty) - most; n > 0 {
		out = append(out, Finding{State: Warn, Text: fmt.Sprintf("and %d services more have none", n)})
	}
	return out
}

// checkDNS asks the cluster's resolvers: services of kube-system with UDP port
// 53. Their backends are asked, too, which tells a broken service from broken
// pods.
func checkDNS(ctx context.Context, f Facts) (out []Finding) {
	if f.Services == nil {
		return []Finding{{State: Warn, Text: "the agent is not there to say where the cluster's resolver is"}}
	}
	const hurts = "pods cannot resolve names"
	for _, s := range f.Services.Services {
		front := slices.IndexFunc(s.Frontends, func(a netip.AddrPort) bool { return a.Port() == 53 && !a.Addr().IsUnspecified() })
		if s.Kind == "Pod" || s.Namespace != "kube-system" || s.Protocol != "UDP" || front < 0 {
			continue
		}
		object := "Service " + ServiceName(s)
		if len(s.Backends) == 0 {
			out = append(out, Finding{State: Fail, Object: object, Text: "the cluster's resolver has no usable endpoint: " + hurts,
				WayOut: "look at its pods: kubectl -n " + s.Namespace + " get pods,endpointslices"})
			continue
		}
		err := f.Host.AskDNS(ctx, s.Frontends[front])
		if err == nil {
			continue
		}
		var silent []string
		for _, b := range s.Backends {
			if f.Host.AskDNS(ctx, b) != nil {
				silent = append(silent, b.String())
			}
		}
		x := Finding{State: Fail, Object: object, Text: fmt.Sprintf("the cluster's resolver does not answer at %s (%v): %s. ", s.Frontends[front], err, hurts)}
		switch {
		case len(silent) == 0:
			x.Text += "Its endpoints answer: it is the service, or what translates it"
			x.WayOut = "podweir services, podweir flows --to " + s.Frontends[front].Addr().String()
		case len(silent) < len(s.Backends):
			x.Text += "Of its endpoints these do not answer: " + strings.Join(silent, ", ")
			x.WayOut = "look at these pods and at their nodes: podweir doctor there"
		default:
			x.Text += "None of its endpoints answers: " + strings.Join(silent, ", ")
			x.WayOut = "is its targetPort the one that its pods listen on; what do their logs say?"
		}
		out = append(out, x)
	}
	return out
}

// checkLeftovers looks for what a kube-proxy and another CNI plugin have left.
func checkLeftovers(ctx context.Context, f Facts) (out []Finding) {
	left, err := f.Host.KubeProxy(ctx)
	for _, t := range left.Troubles() {
		out = append(out, Finding{State: Warn, Object: t.Object, Text: t.Text, WayOut: t.WayOut})
	}
	if err != nil {
		out = append(out, Finding{State: Warn, Text: fmt.Sprintf("what a kube-proxy may have left cannot be read: %v", err)})
	}
	var ranges []netip.Prefix // unknown without the agent: then no route is judged
	if f.Status != nil {
		for _, n := range f.Status.Nodes {
			ranges = append(ranges, n.PodCIDRs...)
		}
	}
	view, err := f.Host.OldCNI()
	for _, t := range view.Troubles(ranges) {
		out = append(out, Finding{State: Warn, Object: t.Object, Text: t.Text, WayOut: t.WayOut})
	}
	if err != nil {
		out = append(out, Finding{State: Warn, Text: fmt.Sprintf("what another CNI plugin may have left cannot be read: %v", err)})
	}
	return out
}
