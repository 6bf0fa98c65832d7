package ipam

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
)

// Reasons that an address is not given; errors wrap one of them.
var (
	ErrNoCIDR    = errors.New("the node has no pod CIDR yet")
	ErrExhausted = errors.New("no address is free")
	ErrTaken     = errors.New("the address is in use")
	ErrOutside   = errors.New("the address is in none of the node's pod CIDRs")
	ErrReserved  = errors.New("the address is never given to a pod")
)

// maxFreed bounds how many freed addresses are remembered.
const maxFreed = 1024

// Allocator gives out addresses. The zero value is ready and has no CIDRs.
type Allocator struct {
	mu    sync.Mutex
	pools []*pool
	node  map[netip.Addr]struct{}
	owner map[netip.Addr]string
	freed map[netip.Addr]uint64 // given back lately, and in which order
	seq   uint64
}

// pool is one CIDR.
type pool struct {
	cidr        netip.Prefix
	first, last netip.Addr // that may be given out
	next        netip.Addr // where the next search starts
}

func newPool(cidr netip.Prefix) *pool {
	first := cidr.Addr().Next().Next() // past the network and the gateway
	last := lastAddr(cidr)
	if cidr.Addr().Is4() {
		last = last.Prev() // the broadcast address
	}
	return &pool{cidr: cidr, first: first, last: last, next: first}
}

// usable tells whether a lies between the reserved ends of p.
func (p *pool) usable(a netip.Addr) bool {
	return p.first.IsValid() && p.last.IsValid() && p.first.Compare(a) <= 0 && a.Compare(p.last) <= 0
}

func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// size returns how many addresses p may give out, at most limit.
func (p *pool) size(limit int) int {
	if !p.usable(p.first) {
		return 0
	}
	if bits := p.cidr.Addr().BitLen() - p.cidr.Bits(); bits < 31 {
		reserved := 2
		if p.cidr.Addr().Is4() {
			reserved = 3
		}
		return min(limit, 1<<bits-reserved)
	}
	return limit
}

// SetCIDRs replaces the CIDRs. Addresses in use stay in use, inside or
// outside. An invalid or overlapping CIDR is an error and changes nothing.
func (a *Allocator) SetCIDRs(cidrs []netip.Prefix) error {
	pools := make([]*pool, 0, len(cidrs))
	for _, c := range cidrs {
		if !c.IsValid() || c.Addr().Is4In6() {
			return fmt.Errorf("pod CIDR %q is not valid", c)
		}
		c = c.Masked()
		for _, other := range pools {
			if other.cidr.Overlaps(c) {
				return fmt.Errorf("pod CIDRs %s and %s overlap", other.cidr, c)
			}
		}
		pools = append(pools, newPool(c))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range pools {
		if i := slices.IndexFunc(a.pools, func(o *pool) bool { return o.cidr == p.cidr }); i >= 0 {
			p.next = a.pools[i].next
			continue
		}
		for addr := range a.owner {
			p.advance(addr)
		}
	}
	a.pools = pools
	return nil
}

// advance moves the start of the next search past addr, unless it is there.
func (p *pool) advance(addr netip.Addr) {
	if p.usable(addr) && p.next.Compare(addr) <= 0 {
		p.next = p.after(addr)
	}
}

// after returns the address to try after addr.
func (p *pool) after(addr netip.Addr) netip.Addr {
	if addr.Compare(p.last) >= 0 {
		return p.first
	}
	return addr.Next()
}

// SetNodeAddrs names the addresses that belong to the node itself.
func (a *Allocator) SetNodeAddrs(addrs []netip.Addr) {
	node := make(map[netip.Addr]struct{}, len(addrs))
	for _, addr := range addrs {
		node[addr.WithZone("").Unmap()] = struct{}{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.node = node
}

// CIDRs returns the CIDRs in force.
func (a *Allocator) CIDRs() []netip.Prefix {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]netip.Prefix, 0, len(a.pools))
	for _, p := range a.pools {
		out = append(out, p.cidr)
	}
	return out
}

// Allocate gives owner one address of every family that the node has a CIDR
// for, IPv4 first. A wanted address takes the place of its family's; several
// of one family are all given. Either all are given or none.
func (a *Allocator) Allocate(owner string, wanted ...netip.Addr) ([]netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.pools) == 0 {
		return nil, ErrNoCIDR
	}
	var out []netip.Addr
	for _, w := range wanted {
		w = w.WithZone("").Unmap()
		if slices.Contains(out, w) {
			continue
		}
		if err := a.refusal(w); err != nil {
			return nil, err
		}
		out = append(out, w)
	}
	for _, v6 := range []bool{false, true} {
		isFamily := func(x netip.Addr) bool { return x.Is6() == v6 }
		if slices.ContainsFunc(out, isFamily) {
			continue
		}
		addr, err := a.search(v6)
		if err != nil {
			return nil, err
		}
		if addr.IsValid() {
			out = append(out, addr)
		}
	}
	slices.SortStableFunc(out, func(x, y netip.Addr) int { return cmp.Compare(x.BitLen(), y.BitLen()) })
	for _, addr := range out {
		a.take(owner, addr)
	}
	return out, nil
}

// isFree tells whether p may give addr out.
func (a *Allocator) isFree(p *pool, addr netip.Addr) bool {
	_, owned := a.owner[addr]
	_, node := a.node[addr]
	return !owned && !node && p.usable(addr)
}

// refusal returns why addr cannot be given out, if so.
func (a *Allocator) refusal(addr netip.Addr) error {
	i := slices.IndexFunc(a.pools, func(p *pool) bool { return p.cidr.Contains(addr) })
	if i < 0 {
		return fmt.Errorf("%s: %w %v", addr, ErrOutside, a.prefixes(addr.Is6()))
	}
	if _, ok := a.node[addr]; ok {
		return fmt.Errorf("%s: %w: it belongs to this node", addr, ErrReserved)
	}
	if !a.pools[i].usable(addr) {
		return fmt.Errorf("%s: %w: it is the network, gateway or broadcast address of %s", addr, ErrReserved, a.pools[i].cidr)
	}
	if owner, ok := a.owner[addr]; ok {
		return fmt.Errorf("%s: %w by %s", addr, ErrTaken, owner)
	}
	return nil
}

func (a *Allocator) prefixes(v6 bool) []netip.Prefix {
	out := []netip.Prefix{}
	for _, p := range a.pools {
		if p.cidr.Addr().Is6() == v6 {
			out = append(out, p.cidr)
		}
	}
	return out
}

// search finds a free address of a family; the zero Addr if the node has no
// CIDR of it.
func (a *Allocator) search(v6 bool) (netip.Addr, error) {
	known := false
	for _, p := range a.pools {
		if p.cidr.Addr().Is6() != v6 {
			continue
		}
		known = true
		addr := p.next
		for range p.size(len(a.owner) + len(a.node) + len(a.freed) + 1) {
			if !p.usable(addr) {
				addr = p.first
			}
			if a.freed[addr] == 0 && a.isFree(p, addr) {
				p.next = p.after(addr)
				return addr, nil
			}
			addr = p.after(addr)
		}
	}
	if addr := a.oldest(func(x netip.Addr) bool { return x.Is6() == v6 && a.refusal(x) == nil }); addr.IsValid() {
		return addr, nil
	}
	if known {
		return netip.Addr{}, fmt.Errorf("%w in %v: delete pods or enlarge the node's pod CIDR", ErrExhausted, a.prefixes(v6))
	}
	return netip.Addr{}, nil
}

// oldest returns the address freed first among those that match.
func (a *Allocator) oldest(match func(netip.Addr) bool) netip.Addr {
	var out netip.Addr
	for addr, seq := range a.freed {
		if (!out.IsValid() || seq < a.freed[out]) && match(addr) {
			out = addr
		}
	}
	return out
}

// full tells whether the node has a CIDR of a family and none of its
// addresses is free.
func (a *Allocator) full(v6 bool) bool {
	known := false
	for _, p := range a.pools {
		if p.cidr.Addr().Is6() != v6 {
			continue
		}
		known = true
		addr := p.first
		for range p.size(len(a.owner) + len(a.node) + 1) {
			if a.isFree(p, addr) {
				return false
			}
			addr = p.after(addr)
		}
	}
	return known
}

func (a *Allocator) take(owner string, addr netip.Addr) {
	if a.owner == nil {
		a.owner = map[netip.Addr]string{}
	}
	a.owner[addr] = owner
	delete(a.freed, addr)
}

// Reserve gives owner exactly addrs, which may lie anywhere: it had them
// before a restart. Addresses of another owner are an error and nothing is
// reserved.
func (a *Allocator) Reserve(owner string, addrs ...netip.Addr) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, addr := range addrs {
		if other, ok := a.owner[addr]; ok && other != owner {
			return fmt.Errorf("%s: %w by %s", addr, ErrTaken, other)
		}
	}
	for _, addr := range addrs {
		a.take(owner, addr)
		for _, p := range a.pools {
			p.advance(addr)
		}
	}
	return nil
}

// Release gives addresses back. Those that owner does not hold are left
// alone.
func (a *Allocator) Release(owner string, addrs ...netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, addr := range addrs {
		if a.owner[addr] == owner {
			delete(a.owner, addr)
			if a.freed == nil {
				a.freed = map[netip.Addr]uint64{}
			}
			a.seq++
			a.freed[addr] = a.seq
		}
	}
	for len(a.freed) > maxFreed {
		delete(a.freed, a.oldest(func(netip.Addr) bool { return true }))
	}
}

// Owner returns who holds addr, if anyone.
func (a *Allocator) Owner(addr netip.Addr) (string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	owner, ok := a.owner[addr]
	return owner, ok
}

// Ready returns an error if Allocate without wanted addresses would fail.
func (a *Allocator) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.pools) == 0 {
		return ErrNoCIDR
	}
	for _, v6 := range []bool{false, true} {
		if a.full(v6) {
			return fmt.Errorf("%w in %v", ErrExhausted, a.prefixes(v6))
		}
	}
	return nil
}
