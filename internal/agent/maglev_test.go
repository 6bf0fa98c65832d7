package agent

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/reconcile"
	"github.com/podweir/podweir/internal/service"
)

func maglevEntries(size uint32, ports ...uint16) []maps.Maglev {
	var backends []maps.Backend
	for _, p := range ports {
		backends = append(backends, maps.Backend{Addr: ip("10.244.80.66"), Port: p})
	}
	return service.MaglevChunks(service.Maglev(backends, size))
}

// A table is in the map whole or not at all, and what was there before a
// restart is known by what is in it.
func TestMaglevStore(t *testing.T) {
	j := &journal{}
	m := newMem[maps.MaglevKey, maps.Maglev]("pw_maglev", j)
	s := newMaglevStore(m)
	tables := reconcile.New(s)
	want := func(set uint32, entries []maps.Maglev) {
		s.prepare(set, entries)
		tables.Set(set, s.table(entries))
	}
	small, other := maglevEntries(251, 80, 81), maglevEntries(1021, 80, 81)
	m.size = len(small) + len(other) - 1
	want(1, small)
	want(2, other)
	tables.Upsert()
	done, failed := uint32(1), uint32(2)
	if tables.Err(done) != nil {
		done, failed = failed, done
	}
	if tables.Err(done) != nil || tables.Err(failed) == nil {
		t.Fatalf("one of two has no room: %v, %v", tables.Err(1), tables.Err(2))
	}
	for k := range m.m {
		if k.Set == failed {
			t.Fatalf("a part of a table that has no room is there: %v", k)
		}
	}
	if s.total != len(m.m) || s.total == 0 {
		t.Errorf("%d chunks are counted, there are %d", s.total, len(m.m))
	}
	m.size = 1000
	tables.Delete(failed)
	s.forget(failed)
	tables.Prune()
	want(failed, maglevEntries(251, 80, 81, 82))
	tables.Upsert()
	if len(s.pending) != 0 {
		t.Errorf("entries of %d tables are kept when all are written", len(s.pending))
	}

	// Again over the same map, of which a chunk is lost and one is damaged.
	damaged := maps.MaglevKey{Set: failed, Chunk: 1}
	v := m.m[damaged]
	v.Slot[3]++
	m.m[damaged] = v
	delete(m.m, maps.MaglevKey{Set: done, Chunk: 2})
	s = newMaglevStore(m)
	tables = reconcile.New(s)
	if err := tables.Load(); err != nil {
		t.Fatal(err)
	}
	if s.total != len(m.m) {
		t.Errorf("%d chunks are counted, there are %d", s.total, len(m.m))
	}
	for set, entries := range map[uint32][]maps.Maglev{
		1: small, 2: other, failed: maglevEntries(251, 80, 81, 82),
	} {
		if have, _ := tables.Actual(set); have == s.table(entries) {
			t.Errorf("table %d, damaged, passes for whole", set)
		}
		want(set, entries)
	}
	tables.Upsert()
	if have, _ := tables.Actual(done); have.chunks == 0 || s.total != len(m.m) {
		t.Errorf("after repair: %+v, %d chunks counted of %d", have, s.total, len(m.m))
	}
	tables.Delete(1)
	tables.Delete(2)
	tables.Prune()
	if len(m.m) != 0 || s.total != 0 || len(s.held) != 0 {
		t.Errorf("left: %v, %d, %v", m.m, s.total, s.held)
	}
}

func TestOnlyNoTable(t *testing.T) {
	small, large := noTableError{1021, maps.ErrFull}, noTableError{65521, maps.ErrFull}
	wrap := func(err error) error { return fmt.Errorf("service port: %w", err) }
	for _, c := range []struct {
		err  error
		want uint32
	}{
		{nil, 0}, {small, 1021}, {wrap(small), 1021}, {errors.Join(wrap(large), wrap(small)), 1021},
		{errors.Join(errors.Join(nil, wrap(small)), errTaken), 0}, {maps.ErrFull, 0},
	} {
		if got := onlyNoTable(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

// A service whose table finds no room says so, is served without, costs
// nothing while there is none, and gets its table when there is.
func TestNoRoomForATable(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.done()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	crowd := b.dp.set.Maglev.MaxEntries() - 15 // one piece too many
	b.await("a full map", func() bool { b.a.services.tables.total += crowd; return true })
	b.put(testSlice("web-1", "web", "10.244.158.65", "10.244.158.66"), testService("web", "10.98.0.1", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	}))
	b.await("the problem", func() bool {
		list := b.a.problems["Service default/web"]
		return len(list) == 1 && strings.Contains(list[0].Err, "no Maglev table of 1021 entries") && strings.Contains(list[0].Err, "map is full")
	})
	if v := b.frontend("192.0.2.1"); v.ExtCount != 2 || v.Maglev != 0 {
		t.Errorf("without a table: %+v", v)
	}
	name := types.NamespacedName{Namespace: "default", Name: "web"}
	var compiled, rounds uint64
	due := func() bool { // as if the time had passed
		b.a.retry[name] = time.Now()
		compiled, rounds = b.a.stats.services, b.a.stats.rounds
		return true
	}
	b.await("the next try", due)
	b.put(testPod("another", "node-b", "10.244.158.99", nil)) // a reason for a round
	b.await("a round", func() bool { return b.a.stats.rounds > rounds })
	b.await("nothing compiled", func() bool { return b.a.stats.services == compiled && b.a.retry[name].After(time.Now()) })
	b.await("room", func() bool { b.a.services.tables.total -= crowd; return due() })
	b.put(testPod("a third", "node-b", "10.244.158.98", nil))
	b.await("the table", func() bool {
		return b.frontend("192.0.2.1").Maglev == 1021 && len(b.a.problems["Service default/web"]) == 0
	})
}
