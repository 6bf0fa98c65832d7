package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/maps"
)

const (
	fragmentLost = bpf.DpPwReasonPW_DROP_FRAGMENT
	beforeFirst  = bpf.DpPwReasonPW_DROP_FRAGMENT_BEFORE_FIRST
	reassembly   = bpf.DpPwReasonPW_FRAGMENT_REASSEMBLY
)

// defragging is a datapath of a kernel that reassembles what is left to it.
var defragging = sync.OnceValues(func() (*datapath, error) {
	return load(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024, FragIfindex: reassembles})
})

// forgetful is one that forgets every datagram at once.
var forgetful = sync.OnceValues(func() (d *datapath, err error) {
	d, e := loadAs(loader.Config{FlowsMax: 1024, FlowsNewMax: 1024}, func(spec *ebpf.CollectionSpec) {
		err = spec.Variables["cfg_frag_time"].Set(uint64(0))
	})
	if err == nil {
		err = e
	}
	return d, err
})

func (w *world) use(load func() (*datapath, error)) {
	w.t.Helper()
	d, err := load()
	if err != nil {
		w.t.Fatal(err)
	}
	w.datapath = d
	w.fill()
}

// cut makes fragments of a frame, of this much of the datagram each.
func cut(pkt []byte, id uint32, size int) (out [][]byte) {
	v6 := pkt[12] == 0x86
	head := 34
	if v6 {
		head = 54
	}
	for at := head; at < len(pkt); at += size {
		part, more := pkt[at:min(at+size, len(pkt))], at+size < len(pkt)
		field := uint16(at - head)
		f := slices.Clone(pkt[:head])
		if v6 {
			if more {
				field |= 1
			}
			f = append(f, f[20], 0, byte(field>>8), byte(field), 0, 0, 0, 0)
			binary.BigEndian.PutUint32(f[head+4:], id)
			f[20] = 44
		} else {
			field /= 8
			if more {
				field |= 0x2000
			}
			binary.BigEndian.PutUint16(f[18:], uint16(id))
			binary.BigEndian.PutUint16(f[20:], field)
		}
		f = append(f, part...)
		setLength(f, len(f)-14)
		mend(f)
		out = append(out, f)
	}
	return out
}

// join is the datagram that a receiver makes of fragments, in any order.
func join(t *testing.T, frags [][]byte) []byte {
	t.Helper()
	type part struct {
		off  int
		data []byte
	}
	var parts []part
	var head []byte
	for _, f := range frags {
		p := part{}
		if f[12] == 0x86 {
			p.off, p.data = int(binary.BigEndian.Uint16(f[56:])&^7), f[62:14+40+int(binary.BigEndian.Uint16(f[18:]))]
			if p.off == 0 {
				head = slices.Clone(f[:54])
				head[20] = f[54]
			}
		} else {
			p.off, p.data = int(binary.BigEndian.Uint16(f[20:])&0x1fff)*8, f[34:14+int(binary.BigEndian.Uint16(f[16:]))]
			if p.off == 0 {
				head = slices.Clone(f[:34])
				head[20], head[21] = 0, 0
			}
		}
		parts = append(parts, p)
	}
	slices.SortFunc(parts, func(a, b part) int { return a.off - b.off })
	whole, base := head, len(head)
	for _, p := range parts {
		if len(whole)-base != p.off {
			t.Fatalf("a hole at %d, or an overlap: %d", len(whole)-base, p.off)
		}
		whole = append(whole, p.data...)
	}
	setLength(whole, len(whole)-14)
	if head[12] != 0x86 {
		// The header's own checksum is of the fragments.
		binary.BigEndian.PutUint16(whole[24:], 0)
		binary.BigEndian.PutUint16(whole[24:], ^uint16(onesSum(0, whole[14:34])))
	}
	return whole
}

// A road is a way by which a datagram in fragments goes: where it arrives,
// what becomes of it, and what leaves.
type fragRoad struct {
	what     string
	at       shot
	fr       frame
	ends     reason
	src, dst string // "" = as they came
}

func (w *world) fragRoads() []fragRoad {
	f := w.f
	big := func(fr frame) frame { return fr.with(string(pattern(1500))) }
	return []fragRoad{
		{"pod to pod", shot{hook: fromPod, dev: devClient}, big(udp(ap(f.client, 5000), ap(f.local, podPort))), fwdLocal, "", ""},
		{"pod to pod, TCP", shot{hook: fromPod, dev: devClient}, big(tcp(ap(f.client, 5001), ap(f.local, podPort), syn)), fwdLocal, "", ""},
		{"echo", shot{hook: fromPod, dev: devClient}, big(echo(f.client, f.local, 77)), fwdLocal, "", ""},
		{"pod to remote pod", shot{hook: fromPod, dev: devClient}, big(udp(ap(f.client, 5002), ap(f.remote, podPort))), fwdTunnel, "", ""},
		{"cluster IP", shot{hook: fromPod, dev: devClient}, big(udp(ap(f.client, 5003), ap(f.vip, svcPort))), fwdLocal, "", ap(f.third, podPort).String()},
		{"cluster IP, remote backend", shot{hook: fromPod, dev: devClient}, big(udp(ap(f.client, 5004), ap(f.vipRemote, svcPort))), fwdTunnel, "", ap(f.remote, podPort).String()},
		{"pod to its node", shot{hook: fromPod, dev: devClient}, big(udp(ap(f.client, 5005), ap(f.nodeA, 9000))), fwdHost, "", ""},
		{"from outside to a NodePort", shot{hook: fromNetdev, dev: devWire}, big(udp(ap(f.world, 5006), ap(f.nodeA, nodePort))), fwdTunnel, "", ap(f.remote, podPort).String()},
		{"from outside to a pod", shot{hook: fromNetdev, dev: devWire}, big(udp(ap(f.world, 5007), ap(f.client, 53))), fwdLocal, "", ""},
		{"from a remote pod", w.tunnelShot(f.nodeB, nil), big(udp(ap(f.remote, 5008), ap(f.client, podPort))), fwdLocal, "", ""},
		{"host to a remote pod", shot{hook: toOverlay, dev: devOverlay}, big(udp(ap(f.nodeA, 5009), ap(f.remote, podPort))), fwdTunnel, "", ""},
		{"host to its pod", shot{hook: toPod, dev: devClient}, big(udp(ap(f.nodeA, 5010), ap(f.client, podPort))), fwdLocal, "", ""},
		{"host to a cluster IP", shot{hook: toOverlay, dev: devOverlay}, big(udp(ap(f.nodeA, 5011), ap(f.vip, svcPort))), fwdLocal, "", ap(f.third, podPort).String()},
		{"host to a load balancer", shot{hook: toNetdev, dev: devWire}, big(udp(ap(f.nodeA, 5012), ap(f.lb, svcPort+1))), fwdHost, "", ""},
	}
}

// The first fragment is the flow's packet; the others go its way, translated
// like it, and what the receiver makes of them has a right checksum.
func TestFragmentsFollowTheirFirst(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for i, c := range w.fragRoads() {
			t.Run(c.what, func(t *testing.T) {
				w := newWorld(t, w.f)
				whole := c.fr.bytes(t)
				for round := range 2 {
					var out [][]byte
					for n, f := range cut(whole, uint32(100+2*i+round), 496) {
						s := c.at
						s.pkt = f
						r := w.run(s).ended(c.ends)
						wantNew := uint64(0)
						if n == 0 && round == 0 {
							wantNew = 1
						}
						if r.counts[created] != wantNew || r.counts[miss] != wantNew {
							t.Fatalf("fragment %d of datagram %d: %v", n, round, r)
						}
						out = append(out, r.out)
					}
					got := join(t, out)
					if msg := wrong(got); msg != "" {
						t.Fatalf("%s\n%x", msg, got)
					}
					d, _ := decode(got)
					in, _ := decode(whole)
					if c.dst != "" {
						if _, p := d.ports(); ap(d.dst, p).String() != c.dst {
							t.Fatalf("to %v port %d, want %s", d.dst, p, c.dst)
						}
					}
					if !slices.Equal(d.upper[len(d.upper)-1500:], in.upper[len(in.upper)-1500:]) {
						t.Fatal("the payload was changed")
					}
				}
			})
		}
	})
}

// A pod's datagram to outside, and the answer in fragments.
func TestFragmentsMasqueraded(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.ways()
		fr := udp(ap(w.f.client, 5000), ap(w.f.world, 53)).with(string(pattern(1000)))
		var out [][]byte
		for _, f := range cut(fr.bytes(t), 3, 496) {
			out = append(out, w.run(w.at(fromPod, f)).ended(fwdWire).out)
		}
		d, _ := decode(join(t, out))
		port, _ := d.ports()
		if msg := wrong(join(t, out)); msg != "" || d.src != w.f.nodeA {
			t.Fatalf("%s from %v", msg, d.src)
		}
		answer := udp(ap(w.f.world, 53), ap(w.f.nodeA, port)).with(string(pattern(1000)))
		out = nil
		for _, f := range cut(answer.bytes(t), 3, 496) {
			out = append(out, w.run(w.at(fromNetdev, f)).ended(fwdLocal).out)
		}
		d, _ = decode(join(t, out))
		if msg := wrong(join(t, out)); msg != "" || d.dst != w.f.client {
			t.Fatalf("%s to %v", msg, d.dst)
		}
		// The host's own by the same numbers is the host's.
		own := udp(ap(w.f.world, 53), ap(w.f.nodeA, 22)).with(string(pattern(1000)))
		for _, f := range cut(own.bytes(t), 3, 496) {
			w.run(w.at(fromNetdev, f)).is(passed)
		}
	})
}

// Datagrams are told apart by their number and by where they come from; what
// is not begun is not followed, and what is over is forgotten.
func TestFragmentsAreToldApart(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		a := cut(udp(ap(f.client, 1), ap(f.vip, svcPort)).with(string(pattern(1000))).bytes(t), 1, 496)
		b := cut(udp(ap(f.client, 2), ap(f.vipRemote, svcPort)).with(string(pattern(1000))).bytes(t), 1, 496)
		c := cut(udp(ap(f.client, 3), ap(f.vip, svcPort)).with(string(pattern(1000))).bytes(t), 2, 496)
		pod := func(pkt []byte, dev string) *result {
			t.Helper()
			return w.run(shot{hook: fromPod, dev: dev, pkt: pkt})
		}
		for i := range a {
			pod(a[i], devClient).ended(fwdLocal)
			pod(b[i], devClient).ended(fwdTunnel)
			pod(c[i], devClient).ended(fwdLocal)
			// The same numbers from elsewhere.
			if i > 0 {
				pod(a[i], devThird).ended(spoofedSource)
				w.run(w.at(fromNetdev, slices.Clone(a[i]))).ended(passed)
				w.run(w.at(fromOverlay, a[i])).ended(spoofedSource)
				w.run(w.at(toOverlay, a[i])).ended(beforeFirst)
			}
		}
		// Another source's datagram of that number has not begun.
		other := cut(udp(ap(f.third, 1), ap(f.vip, svcPort)).with(string(pattern(1000))).bytes(t), 1, 496)
		pod(other[1], devThird).ended(beforeFirst)
		// Nor has one whose flow was denied, or whose first is not of a flow.
		fin := cut(tcp(ap(f.client, 9), ap(f.local, 9), rst).with(string(pattern(1000))).bytes(t), 4, 496)
		pod(fin[0], devClient).ended(fwdLocal)
		r := pod(fin[1], devClient).ended(fragmentLost)
		if r.counts[created] != 0 {
			t.Fatalf("a later fragment began a flow: %v", r)
		}

		w.use(forgetful)
		pod(a[0], devClient).ended(fwdLocal)
		pod(a[1], devClient).ended(beforeFirst)
	})
}

// rise has fragments arrive in an order that lets them all rise, and returns
// what the kernel makes of what it got: the fragments in order, in frames with
// the token of the first, one hop further.
func (w *world) rise(at shot, parts [][]byte) (out [][]byte) {
	w.t.Helper()
	w.defrags = true
	out = make([][]byte, len(parts))
	for i := len(parts) - 1; i >= 0; i-- {
		s := at
		s.pkt = parts[i]
		r := w.run(s).is(reassembly)
		if msg := w.wrongRise(r); msg != "" {
			w.t.Fatalf("fragment %d: %s", i, msg)
		}
		out[i] = r.out
	}
	for i := range out {
		copy(out[i][6:12], out[0][6:12])
		if w.f.v6 {
			out[i][21]--
			binary.BigEndian.PutUint32(out[i][58:], binary.BigEndian.Uint32(out[i][58:])+7777) // another id
		} else {
			out[i][22]--
			mend(out[i])
		}
	}
	return out
}

// risen is what came out of the reassembly, of a datagram that was at that hook.
func (w *world) risen(was hook, pkt []byte) *result {
	w.t.Helper()
	return w.run(shot{hook: fromFrag, dev: devFrag, risen: was, pkt: pkt})
}

// A datagram that begins in the middle rises, all of it, if its source is true
// and the kernel will route it; else it is dropped, or the host's own as ever.
func TestFragmentsBeforeTheirFirst(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		type try struct {
			what string
			at   shot
			fr   frame
			want reason // where it is reassembled
			old  reason // and where not
		}
		pod, wire := shot{hook: fromPod, dev: devClient}, shot{hook: fromNetdev, dev: devWire}
		link := netip.MustParseAddr("fe80::5")
		noEndpoint := reason(bpf.DpPwReasonPW_DROP_NO_ENDPOINT)
		tries := []try{
			{"pod to pod", pod, udp(ap(f.client, 1), ap(f.local, 2)), reassembly, beforeFirst},
			{"pod to its node", pod, udp(ap(f.client, 1), ap(f.nodeA, 2)), reassembly, beforeFirst},
			{"pod to the world", pod, udp(ap(f.client, 1), ap(f.world, 2)), reassembly, beforeFirst},
			{"pod under a false name", pod, udp(ap(f.third, 1), ap(f.local, 2)), spoofedSource, spoofedSource},
			{"pod to no pod", pod, udp(ap(f.client, 1), ap(f.free, 2)), noEndpoint, noEndpoint},
			{"pod to a group", pod, udp(ap(f.client, 1), ap(f.multicast, 2)), multicasted, multicasted},
			{"wire to pod", wire, udp(ap(f.world, 1), ap(f.client, 2)), reassembly, beforeFirst},
			{"wire as another pod", wire, udp(ap(f.local, 1), ap(f.client, 2)), spoofedSource, spoofedSource},
			{"wire to the host", wire, udp(ap(f.world, 1), ap(f.nodeA, 2)), reassembly, passed},
			{"another node to the host", wire, udp(ap(f.nodeB, 1), ap(f.nodeA, 2)), reassembly, passed},
			{"wire to a load balancer", wire, udp(ap(f.world, 1), ap(f.lb, 2)), reassembly, passed},
			{"wire as a pod to the host", wire, udp(ap(f.local, 1), ap(f.nodeA, 2)), passed, passed},
			{"wire as the host to itself", wire, udp(ap(f.nodeA, 1), ap(f.nodeA, 2)), passed, passed},
			{"tunnel to pod", w.tunnelShot(f.nodeB, nil), udp(ap(f.remote, 1), ap(f.client, 2)), reassembly, beforeFirst},
			{"tunnel, wrong peer", w.tunnelShot(f.nodeC, nil), udp(ap(f.remote, 1), ap(f.client, 2)), spoofedSource, spoofedSource},
			{"tunnel to the host", w.tunnelShot(f.nodeB, nil), udp(ap(f.remote, 1), ap(f.nodeA, 2)), reassembly, beforeFirst},
			{"tunnel to the world", w.tunnelShot(f.nodeB, nil), udp(ap(f.remote, 1), ap(f.world, 2)), reassembly, beforeFirst},
			{"host to pod", shot{hook: toPod, dev: devClient}, udp(ap(f.nodeA, 1), ap(f.client, 2)), beforeFirst, beforeFirst},
			{"host to service", shot{hook: toOverlay, dev: devOverlay}, udp(ap(f.nodeA, 1), ap(f.vip, svcPort)), beforeFirst, beforeFirst},
			{"host to outside", shot{hook: toNetdev, dev: devWire}, udp(ap(f.nodeA, 1), ap(f.world, 2)), passed, passed},
			{"host to itself", shot{hook: toLo, dev: devLo}, udp(ap(f.nodeA, 1), ap(f.nodeA, 2)), passed, passed},
		}
		if f.v6 {
			tries = append(tries, try{"pod to its link", pod, udp(ap(f.client, 1), ap(link, 2)), beforeFirst, beforeFirst},
				try{"wire to the link", wire, udp(ap(f.world, 1), ap(link, 2)), passed, passed})
		}
		for _, old := range []bool{true, false} {
			if !old {
				w.use(defragging)
			}
			for i, c := range tries {
				t.Run(fmt.Sprintf("%s, old kernel %v", c.what, old), func(t *testing.T) {
					w.t = t
					parts := cut(c.fr.with(string(pattern(1000))).bytes(t), uint32(10+i), 496)
					want := c.want
					if old {
						want = c.old
					}
					for _, part := range []int{2, 1, 0} {
						if part == 0 && want != reassembly && want != beforeFirst {
							break // judged like any other
						}
						if part == 0 && want == beforeFirst && egress(c.at.hook) {
							break
						}
						s := c.at
						s.pkt = parts[part]
						w.run(s).is(want)
					}
				})
			}
		}
	})
}

// What has risen comes back as what it was: by every way it goes on like a
// datagram in order, with the TTL it had, and the receiver finds it right.
func TestFragmentsRise(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		for i, c := range w.fragRoads() {
			if egress(c.at.hook) {
				continue // the stack sends in order
			}
			t.Run(c.what, func(t *testing.T) {
				w := newWorld(t, w.f)
				w.use(defragging)
				whole := c.fr.bytes(t)
				for round := range 2 {
					parts := cut(whole, uint32(300+2*i+round), 496)
					var out [][]byte
					for n, f := range w.rise(c.at, parts) {
						r := w.risen(c.at.hook, f).ended(c.ends)
						if first := n == 0 && round == 0; (r.counts[created] == 1) != first || r.counts[reassembly] != 0 {
							t.Fatalf("fragment %d of datagram %d: %v", n, round, r)
						}
						if c.ends == fwdHost && r.mark&0x1000 == 0 {
							t.Fatal("enters the stack without the mark")
						}
						d, _ := decode(parts[0])
						hops := d.ttl
						if c.ends != fwdHost {
							hops--
						}
						if r.ttl() != hops {
							t.Fatalf("TTL %d, want %d", r.ttl(), hops)
						}
						out = append(out, r.out)
					}
					got := join(t, out)
					if msg := wrong(got); msg != "" {
						t.Fatalf("%s\n%x", msg, got)
					}
					if d, _ := decode(got); c.dst != "" {
						if _, p := d.ports(); ap(d.dst, p).String() != c.dst {
							t.Fatalf("to %v port %d, want %s", d.dst, p, c.dst)
						}
					}
				}
			})
		}
	})
}

// A datagram whose first went to the host rises under a token of its own when
// its address becomes a pod's: what another one was is not forgotten for it.
func TestFragmentsRiseUnderTheirOwnToken(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.use(defragging)
		f := w.f
		token := func(pkt []byte) string { return string(pkt[8:12]) }
		wire := shot{hook: fromNetdev, dev: devWire}
		parts := cut(udp(ap(f.world, 53), ap(f.free, 22)).with(string(pattern(1500))).bytes(t), 4, 496)
		other := w.rise(wire, cut(udp(ap(f.world, 53), ap(f.client, 22)).with(string(pattern(1000))).bytes(t), 3, 496))
		wire.pkt = parts[0]
		w.run(wire).is(passed)
		w.endpoint(f.free, maps.Endpoint{Ifindex: w.index(devThird)})
		var own []string
		for _, pkt := range parts[1:] {
			wire.pkt = pkt
			r := w.fire(wire)
			if r.counts[reassembly] != 1 {
				t.Fatalf("did not rise: %v", r)
			}
			own = append(own, token(r.out))
		}
		if own[0] == token(other[0]) || own[0] == string(make([]byte, 4)) || own[1] != own[0] || own[2] != own[0] {
			t.Errorf("tokens %x, of the other datagram %x", own, token(other[0]))
		}
		if r := w.risen(fromNetdev, other[0]).ended(fwdLocal); wrong(r.out) != "" {
			t.Errorf("the other datagram: %v", r)
		}
	})
}

// The host's own goes back to the device that it came in by, as it came, and
// the hook there lets it by.
func TestFragmentsRiseForTheHost(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.use(defragging)
		parts := cut(udp(ap(w.f.world, 53), ap(w.f.nodeA, 22)).with(string(pattern(1000))).bytes(t), 3, 496)
		at := shot{hook: fromNetdev, dev: devWire}
		for i, f := range w.rise(at, parts) {
			r := w.risen(fromNetdev, f).is(passed)
			want := slices.Clone(parts[i])
			copy(want, w.devs[devWire].mac)
			if w.f.v6 {
				copy(want[58:62], f[58:62])
			} else {
				copy(want[24:26], r.out[24:26])
			}
			if !slices.Equal(r.out, want) || r.action != actRedirect || r.mark != 0 {
				t.Fatalf("fragment %d: mark %#x\n got  %x\n want %x", i, r.mark, r.out, want)
			}
			w.run(shot{hook: fromNetdev, dev: devWire, pkt: r.out}).is(passed)
		}
		if !w.f.v6 {
			// Late copies are the host's, too.
			w.run(shot{hook: fromNetdev, dev: devWire, pkt: parts[2]}).is(passed)
		}
	})
}

// A first fragment that we cannot read does not make the rest of the host's
// datagram ahead of it: in order, all of it is the host's.
func TestFragmentsThatTheHostReads(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.use(defragging)
		f := w.f
		wire := func(pkt []byte) *result {
			t.Helper()
			return w.run(shot{hook: fromNetdev, dev: devWire, pkt: pkt})
		}
		seg := tcp(ap(f.world, 1), ap(f.nodeA, 22), syn).with(string(pattern(1000))).bytes(t)
		quote := udp(ap(f.nodeA, 1), ap(f.world, 2)).with(string(pattern(400))).bytes(t)
		for i, parts := range [][][]byte{
			cut(seg, 1, 8), // less than a TCP header
			cut(icmpError(t, f.world, f.nodeA, quote), 2, 48),
		} {
			for n, part := range parts {
				if r := wire(part).is(passed); r.action != actNext {
					t.Fatalf("datagram %d, fragment %d: action %d", i, n, int32(r.action))
				}
			}
		}
		// In any other order it comes back in order, and is the host's at both
		// hooks, whatever its number is by then.
		for i, parts := range [][][]byte{cut(seg, 3, 8)[:3], cut(icmpError(t, f.world, f.nodeA, quote), 4, 48)[:3]} {
			for n, pkt := range w.rise(shot{hook: fromNetdev, dev: devWire}, parts) {
				r := w.risen(fromNetdev, pkt).is(passed)
				if r := wire(r.out).is(passed); r.action != actNext {
					t.Fatalf("datagram %d out of order, fragment %d: action %d", i, n, int32(r.action))
				}
			}
		}
	})
}

// Nothing but what a hook has sent there comes out, and once.
func TestFragmentsThatDidNotRise(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.use(defragging)
		f := w.f
		at := shot{hook: fromPod, dev: devClient}
		parts := cut(udp(ap(f.client, 1), ap(f.local, 2)).with(string(pattern(1000))).bytes(t), 3, 496)
		up := w.rise(at, parts)
		lie := func(change func(pkt []byte)) []byte {
			pkt := slices.Clone(up[0])
			change(pkt)
			return pkt
		}
		w.risen(fromPod, lie(func(p []byte) { p[9] ^= 1 })).is(fragmentLost)
		other := cut(udp(ap(f.client, 1), ap(f.third, 2)).with(string(pattern(1000))).bytes(t), 3, 496)[0]
		w.risen(fromPod, lie(func(p []byte) { copy(p[14:], other[14:]) })).is(fragmentLost)
		// Of those that came back, too, the first comes first.
		w.risen(fromPod, up[1]).is(beforeFirst)
		w.risen(fromPod, up[0]).ended(fwdLocal)
		w.risen(fromPod, up[1]).ended(fwdLocal)
		// The kernel takes nobody's frames but ours.
		r := w.fire(shot{hook: fromFrag, dev: devFrag, pkt: up[0], other: true})
		if r.action != actDrop || len(r.counts) != 0 {
			t.Errorf("a frame for somebody else: action %d, %v", int32(r.action), r)
		}
		// Small ones of IPv6 come back in one piece.
		if f.v6 {
			whole := udp(ap(f.client, 1), ap(f.local, 2)).with(string(pattern(1000))).bytes(t)
			copy(whole[6:12], up[0][6:12])
			r := w.risen(fromPod, whole).ended(fwdLocal)
			if msg := wrong(r.out); msg != "" {
				t.Error(msg)
			}
		}
	})
}

// What comes out of the reassembly in one piece is judged by what it is then: one
// that would be malformed at the hook where it rose is so here, and never taken
// for a fragment. To the host it goes as it came.
func TestWholeOutOfTheReassembly(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		w.use(defragging)
		f := w.f
		l4 := 34
		if f.v6 {
			l4 = 54
		}
		set := func(at int, v ...byte) func([]byte) []byte {
			return func(p []byte) []byte { copy(p[at:], v); return p }
		}
		short := func(n int) func([]byte) []byte {
			return func(p []byte) []byte { p = p[:n]; setLength(p, n-14); return p }
		}
		from := func(src netip.Addr, dst netip.Addr) map[string][]byte {
			datagram, segment := udp(ap(src, 1), ap(dst, 2)).with(string(pattern(64))), tcp(ap(src, 1), ap(dst, 2), ack)
			out := map[string][]byte{}
			for name, c := range map[string]struct {
				fr frame
				do func([]byte) []byte
			}{
				"UDP length 0":               {datagram, set(l4+4, 0, 0)},
				"UDP length 7":               {datagram, set(l4+4, 0, 7)},
				"UDP length behind the end":  {datagram, set(l4+4, 9, 0)},
				"no UDP header":              {datagram, short(l4 + 7)},
				"data offset 4":              {segment, set(l4+12, 0x40)},
				"data offset behind the end": {segment, set(l4+12, 0xf0)},
				"no TCP header":              {segment, short(l4 + 19)},
				"no ICMP header":             {echo(src, dst, 7), short(l4 + 7)},
				"no SCTP header":             {frame{src: ap(src, 1), dst: ap(dst, 2), proto: maps.ProtoSCTP}, short(l4 + 11)},
			} {
				pkt := c.do(c.fr.bytes(t))
				if !f.v6 {
					binary.BigEndian.PutUint16(pkt[24:], 0)
					binary.BigEndian.PutUint16(pkt[24:], ^uint16(onesSum(0, pkt[14:34])))
				}
				out[name] = pkt
			}
			return out
		}
		try := func(at shot, fr frame, cases map[string][]byte, want reason) {
			up := w.rise(at, cut(fr.with(string(pattern(1000))).bytes(t), 3, 496))[0]
			for name, pkt := range cases {
				at.pkt = pkt
				w.run(at).is(want)
				whole := slices.Clone(pkt)
				copy(whole[6:12], up[6:12])
				r := w.risen(at.hook, whole).is(want)
				if want == passed && !slices.Equal(r.out[l4:], pkt[l4:]) {
					t.Errorf("%s: changed", name)
				}
			}
		}
		try(shot{hook: fromPod, dev: devClient}, udp(ap(f.client, 1), ap(f.local, 2)), from(f.client, f.local), malformed)
		try(shot{hook: fromNetdev, dev: devWire}, udp(ap(f.world, 1), ap(f.client, 2)), from(f.world, f.client), malformed)
		try(shot{hook: fromNetdev, dev: devWire}, udp(ap(f.world, 1), ap(f.nodeA, 2)), from(f.world, f.nodeA), passed)
	})
}

// Nobody puts anything over the header that was judged, or makes one up.
func TestFragmentsThatAreNone(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		f := w.f
		pod := func(pkt []byte) *result { t.Helper(); return w.run(w.at(fromPod, pkt)) }
		seg := tcp(ap(f.client, 1), ap(f.local, 2), syn).with(string(pattern(1000)))
		parts := cut(seg.bytes(t), 1, 8)
		pod(parts[0]).ended(malformed)
		parts = cut(seg.bytes(t), 1, 16)
		pod(parts[0]).ended(malformed)
		pod(cut(seg.bytes(t), 1, 24)[0]).ended(fwdLocal)
		tiny := cut(seg.bytes(t), 1, 8)
		pod(tiny[1]).ended(malformed) // over the flags
		pod(tiny[2]).ended(malformed) // over the checksum
		pod(tiny[3]).ended(fwdLocal)

		odd := cut(udp(ap(f.client, 1), ap(f.local, 2)).with(string(pattern(1000))).bytes(t), 2, 496)[0]
		setLength(odd, len(odd)-14-1)
		mend(odd)
		pod(odd).ended(malformed)
		far := cut(udp(ap(f.client, 1), ap(f.local, 2)).with(string(pattern(1000))).bytes(t), 3, 496)[2]
		if w.f.v6 {
			far[56], far[57] = 0xff, 0xf8
		} else {
			far[20], far[21] = 0x1f, 0xff
			mend(far)
		}
		pod(far).ended(malformed)
		// Neighbour discovery in fragments (RFC 6980), and errors.
		quote := udp(ap(f.local, 1), ap(f.client, 2)).with(string(pattern(400))).bytes(t)
		pod(cut(icmpError(t, f.client, f.local, quote), 4, 48)[0]).ended(fragmentLost)
		// A CRC over what is not here: ports are not translated.
		sctp := frame{src: ap(f.client, 1), dst: ap(f.vip, sctpXlate), proto: maps.ProtoSCTP}
		pod(cut(sctp.with(string(pattern(1000))).bytes(t), 5, 496)[0]).ended(fragmentLost)
		sctp.dst = ap(f.vip, sctpPort)
		for _, p := range cut(sctp.with(string(pattern(1000))).bytes(t), 6, 496) {
			pod(p).ended(fwdLocal)
		}
	})
}
