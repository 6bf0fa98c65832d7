package tunnel

import (
	"net/netip"
	"slices"
)

// prefixIndex finds overlaps in a set of prefixes that do not overlap each
// other: sorted by first address, a prefix can only overlap its neighbours.
type prefixIndex struct {
	sorted []ownedPrefix
}

type ownedPrefix struct {
	prefix netip.Prefix
	owner  string
}

func (x *prefixIndex) search(p netip.Prefix) int {
	i, _ := slices.BinarySearchFunc(x.sorted, p, func(o ownedPrefix, p netip.Prefix) int {
		return o.prefix.Addr().Compare(p.Addr())
	})
	return i
}

// find returns a prefix that overlaps p, and its owner.
func (x *prefixIndex) find(p netip.Prefix) (netip.Prefix, string, bool) {
	i := x.search(p)
	for _, j := range []int{i - 1, i} {
		if j >= 0 && j < len(x.sorted) && x.sorted[j].prefix.Overlaps(p) {
			return x.sorted[j].prefix, x.sorted[j].owner, true
		}
	}
	return netip.Prefix{}, "", false
}

// add enters p, which must not overlap what is there.
func (x *prefixIndex) add(p netip.Prefix, owner string) {
	x.sorted = slices.Insert(x.sorted, x.search(p), ownedPrefix{p, owner})
}
