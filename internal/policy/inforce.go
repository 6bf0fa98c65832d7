package policy

import (
	"cmp"
	gomaps "maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
)

// inForce is what the policies that isolate local pods mention.
type inForce struct {
	groups []*group
	byKey  map[string]*group

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
	pods      []*member

	peers   map[uint32]struct{} // that its rules name
	anyPeer bool                // so they do anybody
	rules   []RuleRef
	refs    []PolicyRef

	number uint32 // of its table; 0: none yet
	digest digest
}

// depends says that the group's table may be another one when identities that
// belong to the peers, or to none, come or go.
func (g *group) depends(peers map[uint32]struct{}) bool {
	if g.anyPeer || g.clustered() {
		return true
	}
	for n := range peers {
		if _, ok := g.peers[n]; ok {
			return true
		}
	}
	return false
}

// read collects what the group's rules name.
func (g *group) read(f *inForce) {
	g.peers = make(map[uint32]struct{})
	for _, p := range g.policies {
		for _, r := range p.rules[g.direction] {
			g.rules = append(g.rules, RuleRef{p.ref(), g.direction, r.index, r.name})
			g.anyPeer = g.anyPeer || r.anyPeer
			for _, pr := range r.peers {
				g.peers[f.number[pr.key]] = struct{}{}
			}
		}
	}
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

func newChoice(policies []*policy, nsLabels map[string]labels.Set) *choice {
	c := &choice{byNamespace: make(map[string][]*policy), shut: make(map[*policy]*policy), nsLabels: nsLabels}
	for _, p := range policies {
		if p.tier == TierNetworkPolicy {
			c.byNamespace[p.namespace] = append(c.byNamespace[p.namespace], p)
		} else {
			c.tiers[p.tier] = append(c.tiers[p.tier], p)
		}
	}
	return c
}

// chosen is what policies make of a local pod, by direction.
type chosen [2]struct {
	policies []*policy
	key      string // of the group
	isolated bool
	named    map[portName]uint16
}

// findInForce groups the local pods and collects what their policies mention,
// if some of that may be different. Numbers of peers are taken from the state
// before; new ones are drawn from the counter.
func (c *Compiler) findInForce(s *work) {
	prev, st := s.prev, s.st
	old := c.f
	if old != nil && !s.local {
		st.peers, st.ports = prev.peers, prev.ports
		return
	}
	groupOf := make(map[netip.Addr][2]string)
	f := &inForce{byKey: make(map[string]*group), number: make(map[string]uint32), blocks: make(map[uint32]*block)}
	seen := make(map[*policy]*[2]bool)
	for _, mb := range c.members.sortedLocal() {
		if mb.chosen == nil {
			mb.chosen = c.choice.choose(&mb.pod)
		}
		for _, a := range mb.addrs {
			groupOf[a] = [2]string{mb.chosen[Ingress].key, mb.chosen[Egress].key}
		}
		for d := range mb.chosen {
			list := mb.chosen[d].policies
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
			f.join(Direction(d), mb)
		}
	}
	f.finish(prev, st)
	st.ports, st.nextClass = prev.ports.next(f.ranges, prev.nextClass)
	s.ports = !slices.Equal(prev.ports.list, st.ports.list)
	s.whole = s.whole || !f.sameTerms(old)
	s.groups = old == nil || len(f.groups) != len(old.groups)
	for key, g := range f.byKey {
		if old != nil && old.byKey[key] != nil && slices.Equal(old.byKey[key].policies, g.policies) {
			was := old.byKey[key]
			g.peers, g.anyPeer, g.rules, g.refs = was.peers, was.anyPeer, was.rules, was.refs
			g.number, g.digest = was.number, was.digest
			continue
		}
		s.groups = true
		s.regrouped = s.regrouped || old != nil && old.byKey[key] != nil
		g.read(f)
	}
	for a, keys := range groupOf {
		was, ok := c.groupOf[a]
		s.regrouped = s.regrouped || ok && was != keys
	}
	c.f, c.groupOf = f, groupOf
}

// sameTerms says that identities are the same to both.
func (f *inForce) sameTerms(old *inForce) bool {
	return gomaps.Equal(f.number, old.number) && slices.Equal(f.egressNames, old.egressNames)
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

// choose finds the policies that are about the pod, and its groups.
func (c *choice) choose(pod *Pod) *chosen {
	out := new(chosen)
	for _, p := range c.of(pod) {
		for d := range out {
			if p.about[d] {
				out[d].policies = append(out[d].policies, p)
			}
		}
	}
	for d := range out {
		o := &out[d]
		var names []portName
		var key strings.Builder
		key.WriteString(Direction(d).String())
		for _, p := range o.policies {
			key.WriteString(" " + p.ref().String())
			if p.shut {
				key.WriteString("!")
			}
			o.isolated = o.isolated || p.tier == TierNetworkPolicy
			if Direction(d) == Egress {
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
		o.named = resolve(pod, slices.Compact(names))
		key.WriteString("|")
		writeNamed(&key, o.named)
		o.key = key.String()
	}
	return out
}

// join puts the pod into the group it belongs to.
func (f *inForce) join(d Direction, mb *member) {
	o := &mb.chosen[d]
	g := f.byKey[o.key]
	if g == nil {
		g = &group{direction: d, policies: o.policies, isolated: o.isolated, named: o.named}
		f.byKey[o.key] = g
		f.groups = append(f.groups, g)
	}
	g.pods = append(g.pods, mb)
}
