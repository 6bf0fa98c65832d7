package policy

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
)

// inForce is what the policies that isolate local pods mention.
type inForce struct {
	groups []*group

	peers  []*peer           // distinct
	number map[string]uint32 // of a peer, by key
	blocks map[uint32]*block // those peers that are blocks

	ranges []portRange // sorted, unique
	// names of ports that egress rules mention, sorted: they are resolved at
	// the peer. Those of ingress rules are resolved at the isolated pod.
	egressNames []portName
	labelKeys   []string // of pods, that peers look at, sorted
}

// group is the local pods that one table serves: selected by the same
// policies and with the same numbers behind the names of ports.
type group struct {
	direction Direction
	policies  []*policy // in the order in which they are asked
	isolated  bool      // by NetworkPolicies
	named     map[portName]uint16
	pods      []*Pod
}

// clustered says that there are ClusterNetworkPolicies among the policies.
func (g *group) clustered() bool {
	return slices.ContainsFunc(g.policies, func(p *policy) bool { return p.tier != TierNetworkPolicy })
}

// policyRefs names the group's policies.
func (g *group) policyRefs() []PolicyRef {
	out := make([]PolicyRef, len(g.policies))
	for i, p := range g.policies {
		out[i] = p.ref()
	}
	return out
}

// choice is the policies to choose from for each pod.
type choice struct {
	tiers       [tierCount][]*policy // ClusterNetworkPolicies
	byNamespace map[string][]*policy // NetworkPolicies
	shut        map[*policy]*policy  // see policy.closed
	nsLabels    map[string]labels.Set
}

// of returns the policies that select the pod, in the order in which they are
// asked. Where the pod's namespace is not known yet, a ClusterNetworkPolicy
// that may select it counts in its closed reading.
func (c *choice) of(pod *Pod) []*policy {
	var out []*policy
	set, known := c.nsLabels[pod.Namespace]
	for t := range tierCount {
		if t == TierNetworkPolicy {
			for _, p := range c.byNamespace[pod.Namespace] {
				if p.selects.podSel.Matches(labels.Set(pod.Labels)) {
					out = append(out, p)
				}
			}
			continue
		}
		for _, p := range c.tiers[t] {
			switch {
			case !p.selects.podSel.Matches(labels.Set(pod.Labels)):
			case p.selects.nsSel.Empty() || p.selects.inNamespace(pod.Namespace, set, known):
				out = append(out, p)
			case !known:
				if c.shut[p] == nil {
					c.shut[p] = p.closed()
				}
				out = append(out, c.shut[p])
			}
		}
	}
	return out
}

// findInForce groups the local pods and collects what their policies mention.
// Numbers of peers are taken from st; new ones are drawn from its counter.
func findInForce(local []*Pod, policies []*policy, nsLabels map[string]labels.Set, prev, st *State) *inForce {
	c := &choice{byNamespace: make(map[string][]*policy), shut: make(map[*policy]*policy), nsLabels: nsLabels}
	for _, p := range policies {
		if p.tier == TierNetworkPolicy {
			c.byNamespace[p.namespace] = append(c.byNamespace[p.namespace], p)
		} else {
			c.tiers[p.tier] = append(c.tiers[p.tier], p)
		}
	}
	f := &inForce{number: make(map[string]uint32), blocks: make(map[uint32]*block)}
	groups := make(map[string]*group)
	seen := make(map[*policy]*[2]bool)
	for _, pod := range local {
		var selected [2][]*policy
		for _, p := range c.of(pod) {
			for _, d := range []Direction{Ingress, Egress} {
				if p.about[d] {
					selected[d] = append(selected[d], p)
				}
			}
		}
		for d, list := range selected {
			if len(list) == 0 {
				continue
			}
			for _, p := range list {
				if seen[p] == nil {
					seen[p] = new([2]bool)
				}
				if !seen[p][d] {
					seen[p][d] = true
					f.mention(p, Direction(d))
				}
			}
			f.join(groups, Direction(d), list, pod)
		}
	}
	f.finish(prev, st)
	return f
}

// mention collects the peers, ranges and names of a policy in one direction.
func (f *inForce) mention(p *policy, d Direction) {
	for _, r := range p.rules[d] {
		for _, pr := range r.peers {
			if _, ok := f.number[pr.key]; !ok {
				f.number[pr.key] = 0
				f.peers = append(f.peers, pr)
			}
		}
		for _, ps := range r.portSets {
			switch {
			case ps.kind == portRanged:
				f.ranges = append(f.ranges, ps.rng)
			case ps.kind == portNamed && d == Egress:
				f.egressNames = append(f.egressNames, portName{ps.name, ps.proto})
			}
		}
	}
}

func (f *inForce) finish(prev, st *State) {
	slices.SortFunc(f.peers, func(a, b *peer) int { return cmp.Compare(a.key, b.key) })
	for _, pr := range f.peers {
		n, ok := prev.peers[pr.key]
		if !ok {
			n = st.nextPeer
			st.nextPeer++
		}
		f.number[pr.key] = n
		if pr.block != nil {
			f.blocks[n] = pr.block
		}
		if pr.podSel == nil {
			continue
		}
		reqs, _ := pr.podSel.Requirements()
		for _, r := range reqs {
			f.labelKeys = append(f.labelKeys, r.Key())
		}
	}
	st.peers = f.number
	slices.Sort(f.labelKeys)
	f.labelKeys = slices.Compact(f.labelKeys)
	slices.SortFunc(f.ranges, compareRanges)
	f.ranges = slices.Compact(f.ranges)
	slices.SortFunc(f.egressNames, comparePortNames)
	f.egressNames = slices.Compact(f.egressNames)
}

func comparePortNames(a, b portName) int {
	return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.proto, b.proto))
}

// join puts the pod into the group it belongs to.
func (f *inForce) join(groups map[string]*group, d Direction, list []*policy, pod *Pod) {
	var names []portName
	var key strings.Builder
	isolated := false
	key.WriteString(d.String())
	for _, p := range list {
		key.WriteString(" " + p.ref().String())
		if p.shut {
			key.WriteString("!")
		}
		isolated = isolated || p.tier == TierNetworkPolicy
		if d == Egress {
			continue
		}
		for _, r := range p.rules[d] {
			for _, ps := range r.portSets {
				if ps.kind == portNamed {
					names = append(names, portName{ps.name, ps.proto})
				}
			}
		}
	}
	slices.SortFunc(names, comparePortNames)
	named := resolve(pod, slices.Compact(names))
	key.WriteString("|")
	writeNamed(&key, named)
	g := groups[key.String()]
	if g == nil {
		g = &group{direction: d, policies: list, isolated: isolated, named: named}
		groups[key.String()] = g
		f.groups = append(f.groups, g)
	}
	g.pods = append(g.pods, pod)
}
