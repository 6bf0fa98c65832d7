package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/firewall"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/tunnel"
)

func checkAgent(_ context.Context, f Facts) (out []Finding) {
	if f.Status == nil {
		return []Finding{{State: Fail, Text: fmt.Sprintf("the agent does not answer: %v; packets go on as before, changes are not followed", f.Agent),
			WayOut: "start it, and look at its log"}}
	}
	for _, why := range f.Status.NotReady {
		out = append(out, Finding{State: Fail, Text: "the agent is not ready: " + why})
	}
	for _, p := range f.Status.Problems {
		out = append(out, Finding{State: Warn, Object: p.Object, Text: p.Error})
	}
	return out
}

func checkMaps(_ context.Context, f Facts) []Finding {
	if f.Maps == nil {
		return nil
	}
	return []Finding{{State: Fail, Text: f.Maps.Error(), WayOut: "the agent pins them when it starts; --bpffs names its folder"}}
}

// wanted are the programs of a device by its part.
func wanted(d api.Device) []string {
	switch {
	case d.Name == node.Loopback:
		return []string{"to_lo"}
	case d.Role == "wire":
		return []string{"from_pod_wire"}
	case d.Role == "pod" && d.Filters != "":
		return []string{"from_pod_judge", "to_pod"}
	case d.Role == "pod" && d.Bypassed != "":
		return []string{"to_pod"} // one of both
	case d.Role == "pod":
		return []string{"from_pod", "to_pod"}
	case d.Role == "overlay":
		return []string{"from_overlay", "to_overlay"}
	case d.Role == "reassembly":
		return []string{"from_frag"}
	}
	return []string{"from_netdev", "to_netdev"}
}

func checkPrograms(_ context.Context, f Facts) (out []Finding) {
	missing := func(name string, index int, want []string) {
		have, err := f.Host.Programs(index)
		if err != nil {
			out = append(out, Finding{State: Warn, Object: "Device " + name, Text: fmt.Sprintf("its programs cannot be listed: %v", err)})
			return
		}
		for _, p := range want {
			if !slices.Contains(have, p) {
				out = append(out, Finding{State: Fail, Object: "Device " + name,
					Text:   fmt.Sprintf("program %s is not attached: packets there meet neither services nor policy", p),
					WayOut: "the agent attaches it again within ten seconds; if it does not, its log says why"})
			}
		}
	}
	if f.Status != nil {
		for _, d := range f.Status.Devices {
			missing(d.Name, d.Ifindex, wanted(d))
		}
		return out
	}
	pinned, err := f.Host.Pinned()
	if err != nil {
		return []Finding{{State: Warn, Text: fmt.Sprintf("what was attached cannot be read: %v", err)}}
	}
	for index, programs := range pinned {
		missing("with index "+strconv.Itoa(index), index, programs)
	}
	return out
}

func checkSysctls(_ context.Context, f Facts) (out []Finding) {
	want := func(name, value, why string) {
		have, err := f.Host.Sysctl(name)
		switch dotted := strings.ReplaceAll(name, "/", "."); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			out = append(out, Finding{State: Warn, Object: dotted, Text: err.Error()})
		case have != value:
			out = append(out, Finding{State: Fail, Object: dotted, Text: fmt.Sprintf("is %s and must be %s: %s", have, value, why),
				WayOut: "the agent sets it again within ten seconds; stop what resets it (sysctl.d, systemd-networkd, NetworkManager)"})
		}
	}
	want("net/ipv4/ip_forward", "1", "pods are routed")
	want("net/ipv6/conf/all/forwarding", "1", "pods are routed")
	want("net/ipv4/conf/all/send_redirects", "0", "the kernel takes it together with the device's, and would send pods elsewhere")
	devices, err := f.Host.Devices()
	if err != nil {
		return append(out, Finding{State: Warn, Text: err.Error()})
	}
	routed := func(name string) {
		for _, family := range []string{"ipv4", "ipv6"} {
			want("net/"+family+"/conf/"+name+"/forwarding", "1", "what comes by that device is routed")
		}
	}
	if f.Status != nil {
		for _, d := range f.Status.Devices {
			if d.Role == "netdev" && d.Name != node.Loopback {
				routed(d.Name)
			}
		}
	}
	if have, err := f.Host.Sysctl("net/ipv4/conf/all/proxy_arp"); err == nil && have == "1" {
		out = append(out, Finding{State: Warn, Object: "net.ipv4.conf.all.proxy_arp",
			Text: "is 1, which the kernel takes together with each device's own: it answers on every device for what it has another route to"})
	}
	for name := range devices {
		if node.IsCover(name) {
			routed(name) // routes are looked up as from there, see internal/node
		}
		pod := node.IsPodDevice(name)
		if !pod && name != node.OverlayName {
			continue
		}
		routed(name)
		conf := "net/ipv4/conf/" + name
		// The kernel takes the larger of all's and the device's.
		want(conf+"/rp_filter", "2", "the kernel would drop what it would not send back by that device")
		want(conf+"/send_redirects", "0", "the kernel would send redirects")
		if !pod {
			continue
		}
		want(conf+"/proxy_arp", "0", "the kernel would answer for other addresses")
		want("net/ipv6/conf/"+name+"/disable_ipv6", "0", "the pod would have no IPv6")
	}
	slices.SortStableFunc(out, func(a, b Finding) int { return strings.Compare(a.Object, b.Object) })
	return out
}

func checkMTU(_ context.Context, f Facts) (out []Finding) {
	s := f.Status
	if s == nil {
		return []Finding{{State: Warn, Text: "the agent is not there to say what it should be"}}
	}
	mtus, err := f.Host.Devices()
	if err != nil {
		return []Finding{{State: Warn, Text: err.Error()}}
	}
	for _, d := range s.Devices {
		have, there := mtus[d.Name]
		switch {
		case d.Role == "pod" && there && s.MTU != 0 && have > s.MTU:
			out = append(out, Finding{State: Warn, Object: "Device " + d.Name,
				Text:   fmt.Sprintf("its MTU is %d, that of pods %d by now: full packets do not fit the way to other nodes", have, s.MTU),
				WayOut: "the agent lowers it within moments; if it does not, podweir status says why, and a pod that is re-created has the right one"})
		// Without a tunnel pods have the device's MTU.
		case s.RoutingMode != "direct" && d.Role == "netdev" && there && slices.Contains(d.Addrs, s.Tunnel.Addr) && tunnel.TunnelMTU(have, s.Tunnel.Addr) < s.Tunnel.MTU:
			out = append(out, Finding{State: Fail, Object: "Device " + d.Name,
				Text: fmt.Sprintf("its MTU of %d leaves %d for what is in the tunnel, which is said to be %d: packets are fragmented or lost",
					have, tunnel.TunnelMTU(have, s.Tunnel.Addr), s.Tunnel.MTU),
				WayOut: "raise the device's MTU, or lower --mtu of the agent"})
		}
	}
	return out
}

// probe is what other nodes send to this one.
type probe struct {
	what  string
	hurts string // what does not work without it
	proto uint8
	port  uint16
	rule  string // for iptables, what lets it in
	nft   string
}

// probes of a routing mode.
func probes(s *api.Status) []probe {
	out := []probe{{
		what:  fmt.Sprintf("the tunnel's packets (UDP port %d)", s.Tunnel.Port),
		hurts: "this host's calls to pods of other nodes, clients outside that come by another node, ICMP errors and fragments; what one pod sends another passes it by, except over an IPv6 underlay",
		proto: 17, port: s.Tunnel.Port,
		rule: fmt.Sprintf("-p udp --dport %d", s.Tunnel.Port), nft: fmt.Sprintf("udp dport %d", s.Tunnel.Port),
	}}
	if strings.HasPrefix(s.RoutingMode, "ipip") {
		out = append(out, probe{
			what: "IPv4 in IPv4 (protocol 4)", hurts: "what is not taken apart before it gets there",
			proto: 4, rule: "-p 4", nft: "meta l4proto 4",
		})
	}
	return out
}

func checkFirewall(ctx context.Context, f Facts) (out []Finding) {
	rules, errs := f.Host.Firewall(ctx)
	for _, err := range errs {
		out = append(out, Finding{State: Warn, Text: fmt.Sprintf("not all of it can be read: %v", err)})
	}
	if chains := rules.ForwardDrops(); len(chains) > 0 {
		out = append(out, Finding{State: OK, Text: "forwards nothing by itself. No packet of a pod depends on that: " + strings.Join(chains, "; ")})
	}
	if f.Status == nil || !f.Status.Tunnel.Addr.IsValid() {
		return append(out, Finding{State: Warn, Text: "the agent is not there to say where the tunnel ends"})
	}
	device := ""
	for _, d := range f.Status.Devices {
		if slices.Contains(d.Addrs, f.Status.Tunnel.Addr) && d.Role == "netdev" {
			device = d.Name
		}
	}
	type found struct {
		drop  firewall.Drop
		probe string
	}
	from := make(map[found][]string)
	var order []found
	for _, p := range probes(f.Status) {
		for _, n := range f.Status.Nodes {
			if n.Self || !n.Addr.IsValid() || n.Addr.Is4() != f.Status.Tunnel.Addr.Is4() {
				continue
			}
			drop, dropped := rules.Input(firewall.Packet{Device: device, Src: n.Addr, Dst: f.Status.Tunnel.Addr, Proto: p.proto, Port: p.port})
			if !dropped {
				continue
			}
			k := found{drop, p.what}
			if from[k] == nil {
				order = append(order, k)
			}
			from[k] = append(from[k], n.Name)
		}
	}
	for _, k := range order {
		i := slices.IndexFunc(probes(f.Status), func(p probe) bool { return p.what == k.probe })
		out = append(out, dropped(probes(f.Status)[i], k.drop, from[k]))
	}
	return out
}

func dropped(p probe, d firewall.Drop, nodes []string) Finding {
	const most = 5
	who := strings.Join(nodes[:min(most, len(nodes))], ", ")
	if len(nodes) > most {
		who += fmt.Sprintf(" and %d more", len(nodes)-most)
	}
	f := Finding{State: Fail, Object: fmt.Sprintf("%s, table %s %s, chain %s", d.Program, d.Family, d.Table, d.Chain)}
	f.Text = fmt.Sprintf("drops %s from node %s: %s. Hurts %s", p.what, who, d.Rule, p.hurts)
	if !d.Sure {
		f.State = Warn
		f.Text = fmt.Sprintf("may drop %s from node %s, which depends on more than this command knows: %s. Would hurt %s", p.what, who, d.Rule, p.hurts)
	}
	f.WayOut = fmt.Sprintf("%s -t %s -I %s %s -s NODES -j ACCEPT", d.Program, d.Table, d.Chain, p.rule)
	if d.Program == "nft" {
		f.WayOut = fmt.Sprintf("nft insert rule %s %s %s %s accept", d.Family, d.Table, d.Chain, p.nft)
	}
	return f
}

func checkQdiscs(_ context.Context, f Facts) (out []Finding) {
	if f.Status == nil {
		return []Finding{{State: Warn, Text: "the agent is not there to say which pods have one"}}
	}
	for _, d := range f.Status.Devices {
		if d.Bypassed == "" {
			continue
		}
		out = append(out, Finding{State: Warn, Object: "Device " + d.Name,
			Text:   fmt.Sprintf("what the pod with %s sends to others does not pass the filters at its ingress: a limit for it there (an ifb) has no effect", addrs(d.Addrs)),
			WayOut: "limit it inside the pod, on its own interface"})
	}
	return out
}

func addrs(list []netip.Addr) string {
	var out []string
	for _, a := range list {
		out = append(out, a.String())
	}
	return strings.Join(out, ", ")
}
