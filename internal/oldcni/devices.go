package oldcni

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/podweir/podweir/internal/node"
)

// Device is what is read of one.
type Device struct {
	Name, Kind string // veth, bridge, vxlan, ...
	Master     string // the bridge that it is a port of
	Port       int    // UDP, of one of kind vxlan
	Up         bool
	Addrs      []netip.Addr
}

// Route is one of the main table.
type Route struct {
	Dst      netip.Prefix
	Device   string // empty: it leads nowhere
	Protocol int
}

// Protocols that Calico's routes have: those that BIRD learned, and Felix's own.
const (
	protoBird  = 12
	protoFelix = 80
)

// known devices are those that a plugin has one of on each node.
func known() map[string]string {
	return map[string]string{
		"flannel.1": "flannel", "flannel-v6.1": "flannel", "cni0": "flannel or the plugin bridge",
		"vxlan.calico": "Calico", "vxlan-v6.calico": "Calico", "wireguard.cali": "Calico", "wg-v6.cali": "Calico",
		"weave": "Weave Net", "cilium_host": "Cilium", "cilium_net": "Cilium", "cilium_vxlan": "Cilium",
		"kube-bridge": "kube-router", "kube-dummy-if": "kube-router",
	}
}

// podOf says whose pod a device leads to, if another plugin's.
func podOf(d Device) string {
	switch {
	case d.Kind != "veth":
		return ""
	case regexp.MustCompile("^cali[0-9a-f]{11}$").MatchString(d.Name):
		return "Calico"
	case regexp.MustCompile("^lxc[0-9a-f]{12}$").MatchString(d.Name):
		return "Cilium"
	case slices.Contains([]string{"cni0", "weave", "kube-bridge"}, d.Master):
		return known()[d.Master]
	}
	return ""
}

func deviceTroubles(devices []Device, ranges []netip.Prefix) (out []Trouble) {
	pods := map[string][]string{} // by whose they are
	for _, d := range devices {
		whose, is := known()[d.Name]
		remove := "on the node: ip link delete dev " + quote(d.Name) + "; or reboot it"
		switch pod := podOf(d); {
		case pod != "":
			pods[pod] = append(pods[pod], d.Name)
		// While it is down it does not have the port.
		case d.Kind == "vxlan" && d.Up && d.Port == node.OverlayPort && d.Name != node.OverlayName:
			if !is {
				whose = "another program"
			}
			out = append(out, Trouble{"Device " + d.Name, fmt.Sprintf("the tunnel of %s has UDP port %d: podweir's cannot be up beside it", whose, node.OverlayPort), remove})
		// The device is the kernel's own, and others balance services with it.
		case d.Name == "tunl0":
			for _, addr := range d.Addrs {
				if within(netip.PrefixFrom(addr, addr.BitLen()), ranges).IsValid() {
					out = append(out, Trouble{"Device tunl0", fmt.Sprintf("it has the address %s, as Calico gives it one: this node takes it for its own, and calls others under it", addr),
						fmt.Sprintf("on the node: ip addr flush dev tunl0 to %s; or reboot it", addr)})
				}
			}
		case strings.HasPrefix(whose, "Cilium"):
			out = append(out, Trouble{"Device " + d.Name, "a device of Cilium is there, and its programs may be on others, where they take packets before podweir",
				"reboot the node once Cilium's DaemonSet is gone"})
		case is:
			out = append(out, Trouble{"Device " + d.Name,
				"a device of " + whose + " is there, with its addresses and routes: what this host sends to addresses of its ranges goes there, but for those of podweir's pods", remove})
		}
	}
	var names []string
	for whose := range pods {
		names = append(names, whose)
	}
	slices.Sort(names)
	for _, whose := range names {
		out = append(out, Trouble{"Device " + andMore(pods[whose]), fmt.Sprintf("pods run here that %s plugged, %d interfaces: what other pods and services send to them is lost", whose, len(pods[whose])),
			"delete these pods, so that they start anew under podweir: podweir status names them"})
	}
	return out
}

// within is the range that has all of p; none is the zero Prefix.
func within(p netip.Prefix, ranges []netip.Prefix) netip.Prefix {
	i := slices.IndexFunc(ranges, func(r netip.Prefix) bool { return r.Contains(p.Addr()) && p.Bits() >= r.Bits() })
	if i < 0 {
		return netip.Prefix{}
	}
	return ranges[i]
}

// routeTroubles are about routes inside the ranges of pods: the longer prefix
// wins, and where it is as long podweir's own cannot be added.
func routeTroubles(routes []Route, ranges []netip.Prefix) []Trouble {
	var list, commands []string
	for _, r := range routes {
		in := within(r.Dst, ranges)
		if !in.IsValid() || r.Protocol != protoBird && r.Protocol != protoFelix || strings.HasPrefix(r.Device, "cali") {
			continue
		}
		list = append(list, r.Dst.String())
		// BIRD may be the node's own, too, which has its default route from
		// there: others' routes stay. All nodes' ranges one by one are too many
		// to print.
		c := fmt.Sprintf("ip %sroute flush root %v proto %d", map[bool]string{true: "-6 "}[in.Addr().Is6()], around(in), r.Protocol)
		if !slices.Contains(commands, c) {
			commands = append(commands, c)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return []Trouble{{"Route " + andMore(list), "routes of Calico lead into the ranges of pods: what this host sends there takes them, and not podweir's",
		"end calico-node, then on the node: " + strings.Join(commands, "; ") + "; or reboot it"}}
}

// around is a network that the ranges of one cluster's nodes are likely to share.
func around(p netip.Prefix) netip.Prefix {
	bits := 16
	if p.Addr().Is6() {
		bits = 48
	}
	return netip.PrefixFrom(p.Addr(), min(bits, p.Bits())).Masked()
}

// quote makes one word of a name for a shell. A device's may have any characters
// but blanks, slashes and colons.
func quote(name string) string {
	if regexp.MustCompile(`^[A-Za-z0-9_.@-]+$`).MatchString(name) {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}
