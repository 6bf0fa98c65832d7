package probe

import "io"

type pattern struct{ off byte }

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = p.off
		p.off++
		if p.off == 251 { // a prime: the pattern never aligns with packets
			p.off = 0
		}
	}
	return len(b), nil
}

// Pattern is an endless stream of the bytes that bulk transfers carry.
func Pattern() io.Reader { return &pattern{} }
