package agent

import "github.com/podweir/podweir/internal/maps"

// lpm finds the longest prefix as the kernel's map does: both families in one
// space of 128 bits, IPv4 below ::ffff:0:0/96.
type lpm[V any] struct {
	m    map[maps.PrefixKey]V
	lens [129]int // how many prefixes have this length
}

func newLPM[V any]() *lpm[V] { return &lpm[V]{m: make(map[maps.PrefixKey]V)} }

func (l *lpm[V]) set(k maps.PrefixKey, v V) {
	if _, ok := l.m[k]; !ok {
		l.lens[k.Len]++
	}
	l.m[k] = v
}

func (l *lpm[V]) remove(k maps.PrefixKey) {
	if _, ok := l.m[k]; ok {
		l.lens[k.Len]--
		delete(l.m, k)
	}
}

// lookup finds the longest prefix of at most maxLen bits that covers addr.
func (l *lpm[V]) lookup(addr [16]byte, maxLen int) (V, bool) {
	for bits := min(maxLen, 128); bits >= 0; bits-- {
		if l.lens[bits] == 0 {
			continue
		}
		if v, ok := l.m[maps.PrefixKey{Len: uint32(bits), Addr: masked(addr, bits)}]; ok {
			return v, true
		}
	}
	var none V
	return none, false
}

// covering finds the longest prefix that holds k, k itself included.
func (l *lpm[V]) covering(k maps.PrefixKey) (V, bool) { return l.lookup(k.Addr, int(k.Len)) }

// parent finds the longest prefix that holds k and is shorter than k.
func (l *lpm[V]) parent(k maps.PrefixKey) (V, bool) { return l.lookup(k.Addr, int(k.Len)-1) }

func masked(addr [16]byte, bits int) [16]byte {
	var out [16]byte
	n := bits / 8
	copy(out[:n], addr[:n])
	if rest := bits % 8; rest != 0 {
		out[n] = addr[n] & (0xff << (8 - rest))
	}
	return out
}
