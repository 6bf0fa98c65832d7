package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
)

// block is an ipBlock: cidr without the excepts.
type block struct {
	cidr    netip.Prefix
	excepts []netip.Prefix // sorted, unique
}

func (b *block) key() string {
	var s strings.Builder
	s.WriteString("b" + b.cidr.String())
	for _, e := range b.excepts {
		s.WriteString("-" + e.String())
	}
	return s.String()
}

// parseCIDR accepts host bits, as the API does, and clears them.
func parseCIDR(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, err
	}
	if p.Addr().Is4In6() {
		return p, fmt.Errorf("%q: write IPv4 as IPv4", s)
	}
	return p.Masked(), nil
}

// block returns nil for one that makes no sense.
func (p parser) block(field string, ib *networkingv1.IPBlock) *block {
	cidr, err := parseCIDR(ib.CIDR)
	if err != nil {
		p.problem(field+".cidr", "%v; the peer matches nothing", err)
		return nil
	}
	b := &block{cidr: cidr}
	for i, s := range ib.Except {
		e, err := parseCIDR(s)
		if err != nil {
			p.problem(fmt.Sprintf("%s.except[%d]", field, i), "%v; the peer matches nothing", err)
			return nil
		}
		if !covers(cidr, e) || e == cidr {
			p.problem(fmt.Sprintf("%s.except[%d]", field, i), "%s is not inside %s; taken as it stands", e, cidr)
		}
		b.excepts = append(b.excepts, e)
	}
	slices.SortFunc(b.excepts, comparePrefixes)
	b.excepts = slices.Compact(b.excepts)
	return b
}

// covers says that every address of q is one of p.
func covers(p, q netip.Prefix) bool {
	return p.Bits() <= q.Bits() && p.Contains(q.Addr())
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// mapped returns p as the map has it: IPv4 below ::ffff:0:0/96.
func mapped(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4() {
		return netip.PrefixFrom(netip.AddrFrom16(p.Addr().As16()), p.Bits()+96)
	}
	return p
}

// lpm finds the longest prefix around an address or prefix, over both
// families, as the map does.
type lpm[V any] struct {
	byPrefix map[netip.Prefix]V // mapped
	lengths  []int              // that occur, longest first
}

func newLPM[V any](m map[netip.Prefix]V) *lpm[V] {
	l := &lpm[V]{byPrefix: make(map[netip.Prefix]V, len(m))}
	for p, v := range m {
		l.insert(p, v)
	}
	return l
}

func (l *lpm[V]) insert(p netip.Prefix, v V) {
	p = mapped(p)
	l.byPrefix[p] = v
	if i, ok := slices.BinarySearchFunc(l.lengths, p.Bits(), func(a, b int) int { return cmp.Compare(b, a) }); !ok {
		l.lengths = slices.Insert(l.lengths, i, p.Bits())
	}
}

// lookup returns the value of the longest prefix around p.
func (l *lpm[V]) lookup(p netip.Prefix) (V, bool) {
	p = mapped(p)
	for _, bits := range l.lengths {
		if bits > p.Bits() {
			continue
		}
		if v, ok := l.byPrefix[netip.PrefixFrom(p.Addr(), bits).Masked()]; ok {
			return v, true
		}
	}
	var zero V
	return zero, false
}

func (l *lpm[V]) addr(a netip.Addr) (V, bool) {
	return l.lookup(netip.PrefixFrom(a, a.BitLen()))
}

// blockSets returns, for every prefix at which membership in the blocks may
// change, the sorted numbers of the blocks around it. When a prefix of IPv6
// covers ::ffff:0:0/96, where the map has IPv4, the set includes 0.0.0.0/0.
func blockSets(blocks map[uint32]*block) map[netip.Prefix][]uint32 {
	starts := make(map[netip.Prefix][]uint32) // blocks with this cidr
	ends := make(map[netip.Prefix][]uint32)   // blocks with this except
	for n, b := range blocks {
		starts[b.cidr] = append(starts[b.cidr], n)
		for _, e := range b.excepts {
			ends[e] = append(ends[e], n)
		}
	}
	var order []netip.Prefix
	for p := range starts {
		order = append(order, p)
	}
	for p := range ends {
		if _, ok := starts[p]; !ok {
			order = append(order, p)
		}
	}
	all4 := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if slices.ContainsFunc(order, func(p netip.Prefix) bool { return p.Addr().Is6() && covers(p, mapped(all4)) }) &&
		!slices.Contains(order, all4) {
		order = append(order, all4)
	}
	// Shorter first: what is around a prefix is around its parent too, but
	// for what starts or ends here.
	slices.SortFunc(order, func(a, b netip.Prefix) int { return cmp.Compare(a.Bits(), b.Bits()) })
	family := [2]*lpm[[]uint32]{newLPM[[]uint32](nil), newLPM[[]uint32](nil)}
	out := make(map[netip.Prefix][]uint32, len(order))
	for _, p := range order {
		tree := family[0]
		if p.Addr().Is6() {
			tree = family[1]
		}
		parent, _ := tree.lookup(p)
		var set []uint32
		for _, n := range slices.Concat(parent, starts[p]) {
			excepted := slices.ContainsFunc(blocks[n].excepts, func(e netip.Prefix) bool { return covers(e, p) })
			if !excepted {
				set = append(set, n)
			}
		}
		slices.Sort(set)
		tree.insert(p, set)
		out[p] = set
	}
	return out
}
