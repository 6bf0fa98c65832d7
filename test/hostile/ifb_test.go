package hostile

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/gopacket/gopacket"
)

// A pod that leads what it sends through an ifb of its own has the kernel leave
// from_pod out. What it sends so is dropped, wherever it goes, and nothing else
// is: the pod's flows go on.
func TestHostileIfb(t *testing.T) {
	if err := features.HaveProgramType(ebpf.Netfilter); err != nil {
		t.Skipf("this kernel has no netfilter programs: %v", err)
	}
	w := newWorld(t)
	for _, name := range []string{"node-a", "ext"} {
		c, err := w.at(name).Capture(w.ctx, "eth0")
		w.must(err)
		w.captures[name] = c
	}
	w.slipPast()
	w.unharmed()
	w.run("N13 past the programs", (*world).pastPrograms)
	w.run("N13 the tunnel's packets past the programs", (*world).pastTunnel)
}

// The same where there is something over the pod's device: what it takes is
// judged there, and what it does not take is dropped.
func TestHostileIfbFilteredPod(t *testing.T) {
	if err := features.HaveProgramType(ebpf.Netfilter); err != nil {
		t.Skipf("this kernel has no netfilter programs: %v", err)
	}
	w := newWorld(t)
	w.filterVillain()
	w.slipPast()
	w.unharmed()
	w.run("N13 spoofed sources from a pod", (*world).spoofedByPod)
	w.run("N13 VXLAN from pods", (*world).podVXLAN)
	w.run("N13 to all on the link", (*world).pastToAll)
}

// pastPrograms: under every name, the pod's own included.
func (w *world) pastPrograms() {
	w.families(func(v6 bool) {
		var frames [][]byte
		for _, src := range []netip.Addr{w.addr("villain", v6), w.addr("peer", v6), w.addr("node-b", v6), w.addr("ext", v6), service(v6)} {
			for _, dst := range []string{"victim", "peer", "node-a", "node-b", "ext"} {
				if d := w.addr(dst, v6); d != src {
					frames = append(frames,
						w.fromPod("villain", v6, udp(ap(src, sport), ap(d, port), []byte(mark))...),
						w.fromPod("villain", v6, tcp(ap(src, sport), ap(d, port), "S", []byte(mark))...))
				}
			}
		}
		w.counted("past the programs", "villain", "node-a", "drop_unjudged", "from_pod", frames...)
	})
}

// pastTunnel: a pod speaks as another node to the tunnel's port of its own.
func (w *world) pastTunnel() {
	w.families(func(v6 bool) {
		for _, outer := range []string{"node-b", "villain"} {
			inner := udp(ap(w.addr("peer", v6), sport), ap(w.addr("victim", v6), port), []byte(mark))
			w.counted("the tunnel's, from "+outer, "villain", "node-a", "drop_unjudged", "from_pod", w.vxlanByPod("villain", w.addr(outer, false), "node-a", v6, inner...))
		}
	})
}

// pastToAll: a frame for all on the link, with a packet for one host in it.
func (w *world) pastToAll() {
	all := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	w.families(func(v6 bool) {
		packet := udp(ap(w.addr("node-b", v6), sport), ap(w.addr("node-a", v6), port), []byte(mark))
		frame := build(append([]gopacket.SerializableLayer{ether(w.mac("villain", "eth0"), all, v6)}, packet...)...)
		w.counted("to all on the link", "villain", "node-a", "drop_unjudged", "from_pod", frame)
	})
}

// slipped is the mark of what the villain leads through its ifb.
const slipped = 1

// slipPast has the villain lead the frames that it sends by hand through an ifb
// in its own namespace. The ifb says of each that the actions of filters are to
// be left out from there on, once: so the second time none of its own is met.
func (w *world) slipPast() {
	w.Helper()
	inside := func(args ...string) {
		w.Helper()
		_, err := w.pod("villain").Exec(w.ctx, args...)
		w.must(err)
	}
	inside("ip", "link", "add", "past", "up", "type", "ifb")
	const (
		at         = 8 // of the mark in struct __sk_buff
		next, pass = -1, 0
	)
	w.attach("past", asm.Instructions{
		asm.StoreImm(asm.R1, at, 0, asm.Word),
		asm.Mov.Imm(asm.R0, next),
		asm.Return(),
	})
	w.attach("eth0", asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, at, asm.Word),
		asm.Mov.Imm(asm.R0, next),
		asm.JEq.Imm(asm.R2, slipped, "out"),
		asm.Mov.Imm(asm.R0, pass),
		asm.Return().WithSymbol("out"),
	})
	inside("tc", "qdisc", "add", "dev", "eth0", "clsact")
	inside("tc", "filter", "add", "dev", "eth0", "egress", "protocol", "all", "u32", "match", "u32", "0", "0",
		"action", "mirred", "egress", "redirect", "dev", "past")
	w.mark = slipped
}

// attach puts a program at the egress of a device of the villain's.
func (w *world) attach(device string, insns asm.Instructions) {
	w.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: insns})
	w.must(err)
	w.Cleanup(func() { _ = p.Close() })
	w.must(w.at("villain").Do(func() error {
		ifi, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		l, err := link.AttachTCX(link.TCXOptions{Interface: ifi.Index, Program: p, Attach: ebpf.AttachTCXEgress})
		if err != nil {
			return fmt.Errorf("egress of %s: %w", device, err)
		}
		w.Cleanup(func() { _ = l.Close() })
		return nil
	}))
}
