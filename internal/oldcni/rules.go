package oldcni

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/podweir/podweir/internal/netfilter"
)

// owner is who made rules, and what they do when nobody keeps them any more.
type owner struct {
	name string
	// chains in tables of iptables, as sed and regexp both read them.
	chains string
	// lines are other rules of its own in what iptables-save prints.
	lines string
	// tables of nftables, as "FAMILY NAME".
	tables []string
	hurts  string
}

const decide = "they go on deciding about what this host sends and gets, by addresses that others have by now"

func owners() []owner {
	return []owner{
		{name: "Calico", chains: "cali-", lines: ` --comment "?cali:`, tables: []string{"ip calico", "ip6 calico"},
			hurts: "they go on deciding about what this host sends and gets, and drop the tunnel's packets of nodes that Calico did not know"},
		{name: "flannel", chains: "FLANNEL-", tables: []string{"ip flannel-ipv4", "ip6 flannel-ipv6"},
			hurts: "what this host sends to pods of other nodes may leave under another of its addresses"},
		{name: "the plugin portmap", chains: "CNI-(HOSTPORT|DN|SN)-", tables: []string{"ip cni_hostport", "ip6 cni_hostport"},
			hurts: "ports of this node go on leading to pods that have gone, and not to who listens there now, but for those that podweir serves to clients outside"},
		{name: "the plugin bridge", chains: "CNI-[0-9a-f]{24}", tables: []string{"inet cni_plugins_masquerade"},
			hurts: "they translate what pods send that have gone; what podweir's pods send does not pass them"},
		{name: "Weave Net", chains: "WEAVE", hurts: decide},
		{name: "Cilium", chains: "(OLD_)?CILIUM_", hurts: decide},
		{name: "kube-router", chains: "KUBE-(ROUTER|POD-FW|NWPLCY)-", hurts: decide},
	}
}

// own are the chains of a table of iptables that are this owner's.
func (o owner) own(t netfilter.Table) []string {
	re := regexp.MustCompile("^(" + o.chains + ")")
	return slices.DeleteFunc(slices.Clone(t.Chains), func(c string) bool { return !re.MatchString(c) })
}

// ruleTroubles has one for every table with rules of somebody's.
func ruleTroubles(tables []netfilter.Table) (out []Trouble) {
	for _, o := range owners() {
		for _, t := range tables {
			object := fmt.Sprintf("%s, table %s %s", t.Kind, t.Family, t.Name)
			var way string
			switch {
			case t.Kind == netfilter.NFTables:
				if !slices.Contains(o.tables, t.Family+" "+t.Name) {
					continue
				}
				way = fmt.Sprintf("nft delete table %s %s", t.Family, t.Name)
			default:
				chains := o.own(t)
				if len(chains) == 0 {
					continue
				}
				object += ", chain " + andMore(chains)
				way = o.remove(t)
			}
			text := "rules of " + o.name + " are there: " + o.hurts
			if strings.HasPrefix(o.name, "the plugin") {
				text += ". Containers of this node that are not Kubernetes' may use them, too"
			}
			out = append(out, Trouble{object, text, "end what keeps them, then on the node: " + way + "; or reboot it"})
		}
	}
	return out
}

// remove is the command that takes what is this owner's out of a table of
// iptables, at once or not at all. Everything else stays as it is, counters, and
// rules of nft that iptables cannot show, too: the script empties chains, deletes
// what leads to them, and then them.
func (o owner) remove(t netfilter.Table) string {
	program := strings.Replace(t.Kind, "iptables", map[string]string{"ip": "iptables", "ip6": "ip6tables"}[t.Family], 1)
	own := "(" + o.chains + ")"
	to := " -[jg] " + own
	if o.lines != "" {
		to = "(" + to + "|" + o.lines + ")"
	}
	script := "/^[*]/p; /^:" + own + `/{p; s/^:([^ ]*).*/-X \1/; H}; /^-A ` + own + "/d; s/^-A (.*" + to + `.*)/-D \1/p; /^COMMIT/{x; G; p}`
	return fmt.Sprintf("%s-save -t %s | sed -nE '%s' | %s-restore --noflush", program, t.Name, script, program)
}

// andMore names the first, and how many there are besides.
func andMore(names []string) string {
	if n := len(names) - 1; n > 0 {
		return fmt.Sprintf("%s and %d more", names[0], n)
	}
	return names[0]
}
