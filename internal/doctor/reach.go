package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/podweir/podweir/internal/api"
)

// checkPods looks at the way from this host to its own pods: the kubelet's
// probes take it. What pods send each other does not depend on routes.
func checkPods(_ context.Context, f Facts) (out []Finding) {
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
	}
	return out
}

// serviceName is namespace/name:port.
func serviceName(s api.Service) string {
	name := s.Namespace + "/" + s.Name
	if s.Port != "" {
		name += ":" + s.Port
	}
	return name
}

// checkServices names what is refused for want of endpoints. That is nothing
// of the node's, and may be as it should be.
func checkServices(_ context.Context, f Facts) (out []Finding) {
	if f.Services == nil {
		return []Finding{{State: Warn, Text: "the agent is not there to say which services there are"}}
	}
	const most = 10
	empty := map[string]bool{}
	for _, s := range f.Services.Services {
		name := serviceName(s)
		if s.Kind == "Pod" || len(s.Frontends) == 0 || len(s.Backends)+len(s.External) > 0 || empty[name] {
			continue
		}
		empty[name] = true
		if len(empty) > most {
			continue
		}
		out = append(out, Finding{State: Warn, Object: "Service " + name,
			Text:   "has no usable endpoint: connections to it are refused",
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
		object := "Service " + serviceName(s)
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

// checkLeftovers looks for what a kube-proxy has left.
func checkLeftovers(ctx context.Context, f Facts) (out []Finding) {
	left, err := f.Host.KubeProxy(ctx)
	for _, t := range left.Troubles() {
		out = append(out, Finding{State: Warn, Object: t.Object, Text: t.Text, WayOut: t.WayOut})
	}
	if err != nil {
		out = append(out, Finding{State: Warn, Text: fmt.Sprintf("what a kube-proxy may have left cannot be read: %v", err)})
	}
	return out
}
