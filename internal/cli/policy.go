package cli

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// podPolicyView is what policy makes of a pod.
type podPolicyView struct {
	Pod      string       `json:"pod,omitempty"`
	Addrs    []netip.Addr `json:"addrs"`
	Identity uint32       `json:"identity"`
	Ingress  tableView    `json:"ingress"`
	Egress   tableView    `json:"egress"`
	// Policies that are about the pod: namespace/name, or
	// "ClusterNetworkPolicy name (tier)"; those that isolate it stand with the
	// direction's table.
	Policies []string `json:"policies,omitempty"`
}

// tableView is a policy table; 0 = no policy is about the pod, everything is
// allowed.
type tableView struct {
	Table uint32 `json:"table"`
	// Policies that isolate the pod in this direction.
	Policies []string `json:"policies,omitempty"`
	// Entries of the map; what none of them allows is denied.
	Entries []policyView `json:"entries"`
}

// policyView is an entry of pw_policy.
type policyView struct {
	Peer     peerView `json:"peer"`
	Protocol string   `json:"protocol"` // any, tcp, ...
	// Ports as written: a number, ranges, or any.
	Ports   string `json:"ports"`
	Verdict string `json:"verdict"`
	RuleID  uint32 `json:"ruleID"`
	Rule    string `json:"rule"`
}

// peerView is an identity with what it stands for.
type peerView struct {
	Identity    uint32 `json:"identity"`
	Description string `json:"description"`
	// Members are addresses and ranges that have the identity.
	Members []netip.Prefix `json:"members,omitempty"`
}

func (s *session) policyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy [namespace/pod | address]",
		Short: "List the policy tables of this node's pods, or the entries of one pod's",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				if _, err := netip.ParseAddr(args[0]); err != nil && !validPod(args[0]) {
					return usageError("%s: is neither a pod (namespace/name) nor an address", args[0])
				}
			}
			return s.withMaps(func(m Maps) error {
				n, err := s.namesFor(cmd.Context(), m, api.PathEndpoints, api.PathPolicy)
				if err != nil {
					return err
				}
				pods, err := readPolicies(m, n)
				if err != nil {
					return err
				}
				if len(args) == 1 {
					if pods, err = findPod(pods, n, args[0]); err != nil {
						return err
					}
				}
				if s.output == "json" || len(args) == 0 {
					return s.print(struct {
						Pods []podPolicyView `json:"pods"`
					}{pods}, policySummary(pods))
				}
				for i := range pods {
					if err := s.printPod(&pods[i]); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	cmd.AddCommand(s.askCommand())
	return s.kubeconfigFlag(cmd)
}

func policySummary(pods []podPolicyView) *table {
	t := newTable("no pods on this node", "POD", "ADDRESSES", "IDENTITY", "INGRESS", "EGRESS", "POLICIES")
	for _, p := range pods {
		t.add(p.Pod, list(texts(p.Addrs), true), maps.IdentityName(p.Identity),
			p.Ingress.summary(), p.Egress.summary(), list(p.Policies, true))
	}
	return t
}

func (v tableView) summary() string {
	switch {
	case v.Table == 0:
		return "open"
	case len(v.Entries) == 0:
		return fmt.Sprintf("table %d: deny all", v.number())
	}
	return fmt.Sprintf("table %d: %d entries", v.number(), len(v.Entries))
}

// number is the table's without the flag in it.
func (v tableView) number() uint32 { return v.Table &^ maps.TableDefault }

// printPod prints everything about one pod.
func (s *session) printPod(p *podPolicyView) error {
	w := s.env.Stdout
	name := p.Pod
	if name == "" {
		name = "(name unknown)"
	}
	_, _ = fmt.Fprintf(w, "Pod %s  %s  identity %s\n", name, list(texts(p.Addrs), true), maps.IdentityName(p.Identity))
	for _, d := range []struct {
		name, peer string
		table      tableView
	}{{"Ingress", "FROM", p.Ingress}, {"Egress", "TO", p.Egress}} {
		switch {
		case d.table.Table == 0:
			_, _ = fmt.Fprintf(w, "\n%s: not isolated, everything is allowed\n", d.name)
			continue
		case len(d.table.Entries) == 0:
			_, _ = fmt.Fprintf(w, "\n%s: %s, no rule allows anything (table %d)\n", d.name, isolated(d.table.Policies), d.table.number())
			continue
		}
		rest := isolated(d.table.Policies) + ", what is not listed is denied"
		if d.table.Table&maps.TableDefault != 0 {
			rest = "of several entries about a peer the narrowest counts"
		}
		_, _ = fmt.Fprintf(w, "\n%s: %s (table %d)\n", d.name, rest, d.table.number())
		t := newTable("", d.peer, "MEMBERS", "PROTO", "PORTS", "VERDICT", "RULE", "+IDENTITY")
		for _, e := range d.table.Entries {
			t.add(e.Peer.Description, list(prefixTexts(e.Peer.Members), s.wide()), e.Protocol, e.Ports, e.Verdict,
				e.Rule, fmt.Sprint(e.Peer.Identity))
		}
		if err := t.write(w, s.wide()); err != nil {
			return err
		}
	}
	return nil
}

// isolated says by which policies; without the agent they are not known.
func isolated(policies []string) string {
	if len(policies) == 0 {
		return "isolated"
	}
	return "isolated by " + strings.Join(policies, ", ")
}

// prefixTexts prints single addresses without their length.
func prefixTexts(prefixes []netip.Prefix) []string {
	out := make([]string, len(prefixes))
	for i, p := range prefixes {
		out[i] = p.String()
		if p.IsSingleIP() {
			out[i] = p.Addr().String()
		}
	}
	return out
}

// findPod returns the pod that arg names, by name or address.
func findPod(pods []podPolicyView, n *names, arg string) ([]podPolicyView, error) {
	addr, err := netip.ParseAddr(arg)
	for i := range pods {
		if err == nil && slices.Contains(pods[i].Addrs, addr.Unmap()) || err != nil && pods[i].Pod == arg {
			return pods[i : i+1], nil
		}
	}
	switch {
	case err == nil:
		return nil, fmt.Errorf("%s is not the address of a pod on this node; 'podweir endpoints' lists them", arg)
	case n.blind():
		return nil, fmt.Errorf("%s: names of pods need the agent, which does not answer, or --kubeconfig; give an address of the pod", arg)
	}
	return nil, fmt.Errorf("%s is no pod on this node; 'podweir endpoints' lists them", arg)
}

// readPolicies returns every pod of the node with the entries of its tables.
func readPolicies(m Maps, n *names) ([]podPolicyView, error) {
	endpoints, err := readEndpoints(m, n)
	if err != nil {
		return nil, err
	}
	tables, err := readTables(m, n)
	if err != nil {
		return nil, err
	}
	view := func(id uint32, policies []string) tableView {
		v := tableView{Table: id, Policies: policies, Entries: []policyView{}}
		if id != 0 && tables[id] != nil {
			v.Entries = tables[id]
		}
		return v
	}
	out := []podPolicyView{}
	for _, e := range endpoints {
		if e.Missing {
			continue
		}
		p := n.podPolicies(e.Pod)
		out = append(out, podPolicyView{
			Pod: e.Pod, Addrs: e.Addrs, Identity: e.Identity, Policies: p.Policies,
			Ingress: view(e.Ingress, p.IngressPolicies), Egress: view(e.Egress, p.EgressPolicies),
		})
	}
	return out, nil
}

// readTables returns the entries of pw_policy by table, sorted.
func readTables(m Maps, n *names) (map[uint32][]policyView, error) {
	entries, err := m.Policy()
	if err != nil {
		return nil, err
	}
	members, err := identityMembers(m)
	if err != nil {
		return nil, err
	}
	keys := map[uint32][]maps.PolicyKey{}
	var classes map[uint16]string
	for k := range entries {
		keys[k.Table] = append(keys[k.Table], k)
		if k.Kind == maps.PolicyClass && classes == nil {
			ports, err := m.PortClasses()
			if err != nil {
				return nil, err
			}
			classes = classRanges(ports)
		}
	}
	out := map[uint32][]policyView{}
	for table, ks := range keys {
		slices.SortFunc(ks, func(a, b maps.PolicyKey) int {
			last := func(k maps.PolicyKey) int { return int(k.Kind / maps.PolicyDefault) }
			return cmp.Or(last(a)-last(b), cmp.Compare(a.Identity, b.Identity), cmp.Compare(a.Kind, b.Kind),
				cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.Port, b.Port))
		})
		for _, k := range ks {
			e := entries[k]
			ports := "any"
			switch k.Kind {
			case maps.PolicyPort:
				ports = fmt.Sprint(k.Port)
			case maps.PolicyClass:
				if ports = classes[k.Port]; ports == "" {
					ports = fmt.Sprintf("class %d: no port", k.Port)
				}
			}
			peer := peerView{k.Identity, n.identity(k.Identity), members[k.Identity]}
			if k.Kind == maps.PolicyDefault {
				peer.Description = "every other peer"
			}
			out[table] = append(out[table], policyView{
				Peer:     peer,
				Protocol: maps.ProtoName(k.Proto), Ports: ports,
				Verdict: maps.VerdictName(e.Verdict), RuleID: e.Rule, Rule: n.rule(e.Rule),
			})
		}
	}
	return out, nil
}

// identityMembers returns the addresses and ranges of every identity that is
// made by policy.
func identityMembers(m Maps) (map[uint32][]netip.Prefix, error) {
	addrs, err := m.Addrs()
	if err != nil {
		return nil, err
	}
	prefixes, err := m.Prefixes()
	if err != nil {
		return nil, err
	}
	out := map[uint32][]netip.Prefix{}
	for k, p := range addrs {
		if p.Identity >= maps.IdentityFirstDynamic {
			a := maps.FromAddr(k)
			out[p.Identity] = append(out[p.Identity], netip.PrefixFrom(a, a.BitLen()))
		}
	}
	for k, p := range prefixes {
		if p.Identity >= maps.IdentityFirstDynamic {
			out[p.Identity] = append(out[p.Identity], maps.FromPrefix(k))
		}
	}
	for _, p := range out {
		slices.SortFunc(p, comparePrefix)
	}
	return out, nil
}

// classRanges returns the ports of every class as ranges: "53,8000-8080".
func classRanges(ports []uint16) map[uint16]string {
	ranges := map[uint16][]string{}
	for first := 0; first < len(ports); {
		last := first
		for last+1 < len(ports) && ports[last+1] == ports[first] {
			last++
		}
		text := fmt.Sprint(first)
		if last > first {
			text = fmt.Sprintf("%d-%d", first, last)
		}
		ranges[ports[first]] = append(ranges[ports[first]], text)
		first = last + 1
	}
	out := map[uint16]string{}
	for class, r := range ranges {
		out[class] = strings.Join(r, ",")
	}
	return out
}
