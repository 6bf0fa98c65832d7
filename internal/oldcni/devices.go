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

func deviceTroubles(devices []Device) (out []Trouble) {
	pods := map[string][]string{} // by whose they are
	for _, d := range devices {
		whose, is := known()[d.Name]
		remove := "on the node: ip link delete " + d.Name + "; or reboot it"
		switch pod := podOf(d); {
		case pod != "":
			pods[pod] = append(pods[pod], d.Name)
		case d.Kind == "vxlan" && d.Port == node.OverlayPort && d.Name != node.OverlayName:
			if !is {
				whose = "another program"
			}
			out = append(out, Trouble{"Device " + d.Name, fmt.Sprintf("the tunnel of %s has UDP port %d: podweir's cannot be up beside it", whose, node.OverlayPort), remove})
		// Without an address it is the kernel's own.
		case d.Name == "tunl0" && len(d.Addrs) > 0:
			out = append(out, Trouble{"Device tunl0", fmt.Sprintf("it has the address %s, as Calico gives it one: this node takes it for its own, and calls others under it", d.Addrs[0]),
				"on the node: ip addr flush dev tunl0; or reboot it"})
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

// routeTroubles are about routes inside the ranges of pods: the longer prefix
// wins, and where it is as long podweir's own cannot be added.
func routeTroubles(routes []Route, ranges []netip.Prefix) []Trouble {
	var list, commands []string
	for _, r := range routes {
		inside := slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(r.Dst.Addr()) && r.Dst.Bits() >= p.Bits() })
		if !inside || r.Protocol != protoBird && r.Protocol != protoFelix || strings.HasPrefix(r.Device, "cali") {
			continue
		}
		list = append(list, r.Dst.String())
		if c := fmt.Sprintf("ip %sroute flush proto %d", map[bool]string{true: "-6 "}[r.Dst.Addr().Is6()], r.Protocol); !slices.Contains(commands, c) {
			commands = append(commands, c)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return []Trouble{{"Route " + andMore(list), "routes of Calico lead into the ranges of pods: what this host sends there takes them, and not podweir's",
		"end calico-node, then on the node: " + strings.Join(commands, "; ") + "; or reboot it"}}
}
