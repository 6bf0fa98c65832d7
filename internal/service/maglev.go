package service

import (
	"encoding/binary"
	"fmt"
	"math/big"

	"github.com/podweir/podweir/internal/maps"
)

// Bounds of the size of a Maglev table.
const (
	MaglevMin = 251
	MaglevMax = 131071
)

// maglevSizes are the sizes to choose from, primes. They are few and the first
// is good for ten backends: where the number of backends passes from one size
// to the next, most flows that are new find another backend.
var maglevSizes = [...]uint32{1021, 4093, 16381, 65521}

// maglevPerBackend is how many entries of a table a backend should have: with
// a hundred, shares differ by about one in a hundred.
const maglevPerBackend = 100

// maxSlots is how many backends the 16 bits of an entry can name.
const maxSlots = 1 << 16

// CheckMaglevSize says what is wrong with a size given for all tables; 0
// stands for a size by the number of backends.
func CheckMaglevSize(size uint32) error {
	switch {
	case size == 0:
		return nil
	case size < MaglevMin || size > MaglevMax:
		return fmt.Errorf("%d: must be 0 or from %d to %d", size, MaglevMin, MaglevMax)
	case !big.NewInt(int64(size)).ProbablyPrime(0): // exact below 2^64
		next := size
		for !big.NewInt(int64(next)).ProbablyPrime(0) {
			next++
		}
		return fmt.Errorf("%d is no prime; the next one is %d", size, next)
	}
	return nil
}

// MaglevSize returns the size of the table of a set of n backends: given, if
// it is not 0 and has room for them, else the smallest of a list of primes
// with a hundred entries for each backend, or the largest of them. 0: no
// table is needed, for one backend or none, or can be had.
func MaglevSize(given uint32, n int) uint32 {
	switch {
	case n < 2 || n > maxSlots:
		return 0
	case given >= uint32(n):
		return given
	}
	for _, size := range maglevSizes {
		if int(size) >= maglevPerBackend*n {
			return size
		}
	}
	if last := maglevSizes[len(maglevSizes)-1]; int(last) >= n {
		return last
	}
	return MaglevMax
}

// Maglev fills a table of a size that [MaglevSize] returned with slots of
// backends (Eisenbud et al., "Maglev: A Fast and Reliable Software Network
// Load Balancer", NSDI 2016, 3.4): each backend has a permutation of the
// table's entries, given by an offset and a step, and in turn takes the next
// entry of it that is free. The result depends on backends, in their order,
// and size alone, so that all nodes agree; a backend more or less moves
// little beside its own share.
func Maglev(backends []maps.Backend, size uint32) []uint16 {
	type permutation struct{ next, step uint32 }
	perms := make([]permutation, len(backends))
	for i, b := range backends {
		h := hashBackend(b)
		perms[i] = permutation{
			next: uint32(mix(h) % uint64(size)),
			step: uint32(mix(h^0x9e3779b97f4a7c15)%uint64(size-1)) + 1,
		}
	}
	table := make([]uint16, size)
	taken := make([]bool, size)
	for filled := uint32(0); ; {
		for i := range perms {
			p := &perms[i]
			for taken[p.next] {
				if p.next += p.step; p.next >= size {
					p.next -= size
				}
			}
			taken[p.next] = true
			table[p.next] = uint16(i)
			if filled++; filled == size {
				return table
			}
		}
	}
}

// hashBackend is FNV-1a (64 bits) of the 16 bytes of the address and the port
// in network order.
func hashBackend(b maps.Backend) uint64 {
	var buf [18]byte
	copy(buf[:], b.Addr.B[:])
	binary.BigEndian.PutUint16(buf[16:], b.Port)
	h := uint64(14695981039346656037)
	for _, c := range buf {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h
}

// mix is the finalizer of splitmix64: every bit of x reaches every bit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// MaglevChunks cuts a table into the entries of pw_maglev for a set, by number.
func MaglevChunks(table []uint16) []maps.Maglev {
	const chunk = len(maps.Maglev{}.Slot)
	out := make([]maps.Maglev, (len(table)+chunk-1)/chunk)
	for i := range out {
		copy(out[i].Slot[:], table[i*chunk:])
	}
	return out
}
