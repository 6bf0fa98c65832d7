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
	policies  []*policy // by name
	named     map[portName]uint16
	pods      []*Pod
}

// policyNames returns the names of the group's policies.
func (g *group) policyNames() []string {
	out := make([]string, len(g.policies))
	for i, p := range g.policies {
		out[i] = p.name
	}
	return out
}

// findInForce groups the local pods and collects what their policies mention.
// Numbers of peers are taken from st; new ones are drawn from its counter.
func findInForce(local []*Pod, policies []*policy, prev, st *State) *inForce {
	byNamespace := make(map[string][]*policy)
	for _, p := range policies {
		byNamespace[p.namespace] = append(byNamespace[p.namespace], p)
	}
	f := &inForce{number: make(map[string]uint32), blocks: make(map[uint32]*block)}
	groups := make(map[string]*group)
	seen := make(map[*policy]*[2]bool)
	for _, pod := range local {
		var selected [2][]*policy
		for _, p := range byNamespace[pod.Namespace] {
			if !p.selects.Matches(labels.Set(pod.Labels)) {
				continue
			}
			for _, d := range []Direction{Ingress, Egress} {
				if p.isolates[d] {
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
	key.WriteString(d.String() + " " + pod.Namespace)
	for _, p := range list {
		key.WriteString(" " + p.name)
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
		g = &group{direction: d, policies: list, named: named}
		groups[key.String()] = g
		f.groups = append(f.groups, g)
	}
	g.pods = append(g.pods, pod)
}
