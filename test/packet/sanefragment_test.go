package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/podweir/podweir/internal/maps"
)

// A datagram is one hook's and one sender's.
type datagramKey struct {
	hook     hook
	src, dst netip.Addr
	proto    uint8 // of IPv4
	id       uint32
	node     uint32
}

// datagram is which one a fragment is of, and where it belongs there.
func (w *world) datagram(s shot, pkt []byte) (k datagramKey, off int, ok bool) {
	d, ok := decode(pkt)
	if !ok || !d.fragment {
		return k, 0, false
	}
	k = datagramKey{hook: s.hook, src: d.src, dst: d.dst, node: w.nodeOf(maps.FromAddr(s.tunnel.peer))}
	if !d.v6 {
		k.proto, k.id = d.proto, uint32(binary.BigEndian.Uint16(pkt[18:]))
		return k, int(binary.BigEndian.Uint16(pkt[20:])&0x1fff) * 8, true
	}
	for next, at := pkt[20], 54; at+8 <= len(pkt) && at < d.at; {
		size := (int(pkt[at+1]) + 1) * 8
		switch next {
		case 44:
			if field := binary.BigEndian.Uint16(pkt[at+2:]); field&0xfff9 != 0 {
				k.id = binary.BigEndian.Uint32(pkt[at+4:])
				return k, int(field &^ 7), true
			}
			size = 8
		case 51:
			size = (int(pkt[at+1]) + 2) * 4
		}
		next, at = pkt[at], at+size
	}
	return k, 0, false
}

// remember keeps what a first fragment says.
func (w *world) remember(s shot) {
	k, off, ok := w.datagram(s, s.pkt)
	if !ok || off != 0 || w.firsts == nil {
		return
	}
	d, _ := decode(s.pkt)
	head := 8
	if d.proto == maps.ProtoTCP && len(d.upper) >= 20 {
		head = int(d.upper[12]>>4) * 4
	}
	if old, ok := w.firsts[k]; !ok || head < old {
		w.firsts[k] = head
	}
}

// wrongLater: a later fragment follows a first, and never lies over its header.
func (w *world) wrongLater(r *result, in []byte) string {
	k, off, ok := w.datagram(r.shot, in)
	if !ok || off == 0 {
		return ""
	}
	head, known := w.firsts[k]
	switch {
	case r.counts[created] != 0 || r.counts[miss] != 0:
		return "a later fragment began a flow"
	case !known:
		return "a fragment went ahead of its first"
	case off < head:
		return fmt.Sprintf("a fragment at %d lies over a header of %d bytes", off, head)
	}
	return ""
}
