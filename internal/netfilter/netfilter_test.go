package netfilter

import "testing"

// What the kernel would never send breaks nothing.
func TestMalformed(t *testing.T) {
	for _, b := range [][]byte{nil, {1}, {3, 0, 1, 0}, {255, 0, 1, 0, 1}, {4, 0, 1, 0, 9}, {5, 0, 4, 0, 1}} {
		_ = byType(b)
		_ = leadsTo(b)
	}
	for _, f := range legacyFamilies() {
		for _, size := range []int{0, 1, f.entryLength, f.entryLength + 64} {
			for _, fill := range []byte{0, 0x7f, 0xff} {
				b := make([]byte, size)
				for i := range b {
					b[i] = fill
				}
				if got := f.chains(b); len(got) != 0 {
					t.Errorf("%d bytes of %#x: %q", size, fill, got)
				}
			}
		}
	}
}
