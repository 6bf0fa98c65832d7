package policy_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	gomaps "maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
	"github.com/podweir/podweir/test/packet/parts"
)

// kernel holds compiled policies in the kernel's own maps and has the
// datapath's own function look verdicts up.
type kernel struct {
	Verdicts    *ebpf.Program `ebpf:"part_verdicts"`
	Addrs       *ebpf.Map     `ebpf:"pw_addrs"`
	Prefixes    *ebpf.Map     `ebpf:"pw_prefixes"`
	Policy      *ebpf.Map     `ebpf:"pw_policy"`
	PortClasses *ebpf.Map     `ebpf:"pw_port_class"`
}

// newKernel needs root.
func newKernel(t testing.TB) *kernel {
	t.Helper()
	spec, err := parts.LoadParts()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	k := &kernel{}
	if err := spec.LoadAndAssign(k, nil); err != nil {
		t.Fatalf("load the datapath's lookup: %v: run as root", err)
	}
	t.Cleanup(func() {
		for _, c := range []interface{ Close() error }{k.Verdicts, k.Addrs, k.Prefixes, k.Policy, k.PortClasses} {
			_ = c.Close()
		}
	})
	return k
}

// fill brings the maps from what an earlier datapath has to what d has; ports
// are those that will be asked about.
func (k *kernel) fill(t testing.TB, old, d *datapath, ports []port) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
	}
	for key := range old.policy {
		check(k.Policy.Delete(key))
	}
	for a := range old.addrs {
		check(k.Addrs.Delete(maps.ToAddr(a)))
	}
	for p := range old.prefixes {
		check(k.Prefixes.Delete(p))
	}
	for key, e := range d.policy {
		check(k.Policy.Put(key, e))
	}
	for a, id := range d.addrs {
		check(k.Addrs.Put(maps.ToAddr(a), maps.Peer{Identity: id}))
	}
	for p, id := range d.prefixes {
		check(k.Prefixes.Put(p, maps.Peer{Identity: id}))
	}
	for _, p := range ports {
		check(k.PortClasses.Put(uint32(p.port), d.class[p.port]))
	}
}

// identity is what the kernel's maps know an address by.
func (k *kernel) identity(t testing.TB, a maps.Addr) uint32 {
	t.Helper()
	var peer maps.Peer
	err := k.Addrs.Lookup(a, &peer)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = k.Prefixes.Lookup(maps.PrefixKey{Len: 128, Addr: a.B}, &peer)
	}
	if err != nil {
		t.Fatalf("look up %v: %v", maps.FromAddr(a), err)
	}
	return peer.Identity
}

// ask has the program answer: verdicts, and the rules they are of. See
// part_question in bpf/parts.c.
func (k *kernel) ask(t *testing.T, d *datapath, in *policy.Input, list []question) []maps.PolicyEntry {
	t.Helper()
	const at, size = 16, 16
	pkt := make([]byte, at+size*len(list))
	le := binary.LittleEndian
	for i, q := range list {
		b := pkt[at+size*i:]
		le.PutUint32(b, d.tables[selfAddr(in, q.self)][q.dir])
		le.PutUint32(b[4:], k.identity(t, maps.ToAddr(q.peer)))
		le.PutUint16(b[12:], q.port)
		b[14] = q.proto
	}
	opts := ebpf.RunOptions{Data: pkt, DataOut: make([]byte, len(pkt)+256)}
	if _, err := k.Verdicts.Run(&opts); err != nil {
		t.Fatal(err)
	}
	out := make([]maps.PolicyEntry, len(list))
	for i := range list {
		b := opts.DataOut[at+size*i:]
		out[i] = maps.PolicyEntry{Rule: le.Uint32(b[8:]), Verdict: b[15]}
	}
	return out
}

// TestDatapathAgrees is the differential test through the datapath's own
// lookup in the kernel's own maps, and holds the lookup of the other tests
// against it. It needs root.
func TestDatapathAgrees(t *testing.T) {
	k := newKernel(t)
	old := &datapath{}
	asked, denied, byDefault := 0, 0, 0
	for seed := range uint64(800) {
		g := newGenerator(1_000_000 + seed)
		in := g.input()
		out := policy.Compile(*in, nil)
		all := newSpace(in)
		if all.size() == 0 {
			continue
		}
		d := load(&out, in)
		k.fill(t, old, d, all.ports)
		old = d
		list := make([]question, 200)
		for i := range list {
			list[i] = all.at(g.r.IntN(all.size()))
		}
		for i, e := range k.ask(t, d, in, list) {
			q := list[i]
			got, want := e.Verdict == maps.VerdictAllow, oracle(in, q)
			if got != want {
				t.Fatalf("seed %d: %+v: the datapath allows: %v, the oracle: %v", seed, q, got, want)
			}
			table := d.tables[selfAddr(in, q.self)][q.dir]
			if mirror := d.entry(selfAddr(in, q.self), q); table != 0 && e.Rule != mirror.Rule {
				t.Fatalf("seed %d: %+v: the datapath names rule %d, its copy here %d", seed, q, e.Rule, mirror.Rule)
			}
			asked++
			if !got {
				denied++
			}
			if table&maps.TableDefault != 0 {
				byDefault++
			}
		}
	}
	t.Logf("%d verdicts, %d denied, %d by tables with a default", asked, denied, byDefault)
	if denied == 0 || denied == asked || byDefault == 0 {
		t.Error("the questions prove nothing")
	}
}

// BenchmarkVerdict is what a verdict costs the datapath, peers and ports in
// random order, so that it pays for what is not in the processor's caches: by
// rules on the pod, by members of a set, by policies on the pod. Each round
// measures all; ratios to the first within a round.
func BenchmarkVerdict(b *testing.B) {
	const asked = 200 // a page holds no more
	cases := []struct {
		name           string
		rules, members int
		policies       int
	}{
		{"1-rule", 1, 1, 1}, {"1000-rules", 1000, 1, 1}, {"10000-rules", 10000, 1, 1},
		{"50000-members", 1, 50000, 1}, {"1000-policies", 1, 1, 1000},
	}
	k := newKernel(b)
	le := binary.LittleEndian
	packets := make([][]byte, len(cases))
	for n, c := range cases {
		// Rules of a policy are about ports of ten apps, a hundred at most.
		in := many(max(c.members, 1000)+1, 1)
		specs(b, in, c.policies, func(i int) string {
			s := `{podSelector: {matchLabels: {app: app0}}, ingress: [`
			if c.members > 1 {
				return s + `{from: [{podSelector: {matchLabels: {all: "yes"}}}], ports: [{port: 1000}]}]}`
			}
			for r := range c.rules {
				s += fmt.Sprintf(`{from: [{podSelector: {matchLabels: {app: app%d}}}], ports: [{port: %d}]},`, 1+(i+r)%90, 1000+r/90)
			}
			return s + `]}`
		})
		out := policy.Compile(*in, nil)
		table := out.Endpoints[key(&in.Pods[0])].In
		number := uint32(n+1) << 16 // of the case's own
		for key, e := range out.Tables[table] {
			key.Table, key.Identity = number, key.Identity+number
			if err := k.Policy.Put(key, e); err != nil {
				b.Fatal(err)
			}
		}
		r := rand.New(rand.NewPCG(1, uint64(n)))
		pkt := make([]byte, 16+16*asked)
		entries := slices.Collect(gomaps.Keys(out.Tables[table]))
		for i := range asked {
			e := entries[r.IntN(len(entries))]
			p := pkt[16+16*i:]
			le.PutUint32(p, number)
			le.PutUint32(p[4:], e.Identity+number)
			le.PutUint16(p[12:], e.Port+uint16(i%2)) // half of them denied
			p[14] = 6
		}
		packets[n] = pkt
	}
	took := make([][]float64, len(cases))
	for b.Loop() {
		for n, pkt := range packets {
			_, t, err := k.Verdicts.Benchmark(pkt, 20, nil)
			if err != nil {
				b.Fatal(err)
			}
			took[n] = append(took[n], float64(t.Nanoseconds())/asked)
		}
	}
	for n, c := range cases {
		slices.Sort(took[n])
		b.ReportMetric(took[n][len(took[n])/2], "ns/"+c.name)
	}
	b.ReportMetric(0, "ns/op")
}
