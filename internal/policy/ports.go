package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// portRange is a range with more than one port, of any protocol.
type portRange struct{ lo, hi uint16 }

func compareRanges(a, b portRange) int {
	return cmp.Or(cmp.Compare(a.lo, b.lo), cmp.Compare(a.hi, b.hi))
}

// partition divides the ports into classes that the ranges do not tell apart.
//
// Besides the ranges in force it tells apart those that were in force before
// the last change. So the classes of one partition always fit the rules of the
// one before: of two ports in one class, none of the previous tables allows
// one and not the other. That is what makes a change of classes exact.
type partition struct {
	inForce []portRange // sorted, unique
	list    []PortClass // sorted, without class 0
	classes map[string]uint16
	foreign bool // restored: the numbers are somebody else's
}

// next returns the partition for the ranges in force, and the class counter.
func (p partition) next(inForce []portRange, counter uint16) (partition, uint16) {
	if !p.foreign && slices.Equal(inForce, p.inForce) {
		return p, counter
	}
	all := slices.Concat(inForce, p.inForce)
	slices.SortFunc(all, compareRanges)
	all = slices.Compact(all)

	used := make(map[uint16]bool)
	for _, c := range p.list {
		used[c.Class] = true
	}
	n := partition{inForce: inForce, classes: make(map[string]uint16)}
	for _, iv := range intervals(all) {
		var sig strings.Builder
		for _, r := range all {
			if r.lo <= iv.lo && iv.hi <= r.hi {
				fmt.Fprintf(&sig, "%d-%d ", r.lo, r.hi)
			}
		}
		if sig.Len() == 0 {
			continue
		}
		class, ok := n.classes[sig.String()]
		if !ok {
			if class, ok = p.classes[sig.String()]; !ok {
				for counter == 0 || used[counter] {
					counter++
				}
				class = counter
				used[class] = true
				counter++
			}
			n.classes[sig.String()] = class
		}
		n.list = append(n.list, PortClass{Lo: iv.lo, Hi: iv.hi, Class: class})
	}
	return n, counter
}

// intervals cuts the span of sorted ranges at every end of a range.
func intervals(ranges []portRange) []portRange {
	var starts []int
	for _, r := range ranges {
		starts = append(starts, int(r.lo), int(r.hi)+1)
	}
	slices.Sort(starts)
	starts = slices.Compact(starts)
	var out []portRange
	for i := 1; i < len(starts); i++ {
		out = append(out, portRange{uint16(starts[i-1]), uint16(starts[i] - 1)})
	}
	return out
}

// restorePartition takes what the map holds; each stretch counts as a range.
func restorePartition(list []PortClass) partition {
	p := partition{foreign: true, list: slices.Clone(list)}
	slices.SortFunc(p.list, func(a, b PortClass) int { return cmp.Compare(a.Lo, b.Lo) })
	for _, c := range p.list {
		p.inForce = append(p.inForce, portRange{c.Lo, c.Hi})
	}
	return p
}

// of returns the class of a port.
func (p partition) of(port uint16) uint16 {
	i, _ := slices.BinarySearchFunc(p.list, port, func(c PortClass, port uint16) int {
		return cmp.Compare(c.Hi, port)
	})
	if i < len(p.list) && p.list[i].Lo <= port {
		return p.list[i].Class
	}
	return 0
}

// within returns the classes of the ports from lo to hi, sorted; 0 when some
// port is in none.
func (p partition) within(lo, hi uint16) []uint16 {
	var out []uint16
	next := int(lo) // the first port not yet accounted for
	for _, c := range p.list {
		if c.Hi < lo || c.Lo > hi {
			continue
		}
		if int(c.Lo) > next {
			out = append(out, 0)
		}
		out = append(out, c.Class)
		next = int(c.Hi) + 1
	}
	if next <= int(hi) {
		out = append(out, 0)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// all returns every class, 0 first.
func (p partition) all() []uint16 {
	out := []uint16{0}
	for _, c := range p.list {
		out = append(out, c.Class)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
