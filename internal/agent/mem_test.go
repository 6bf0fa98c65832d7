package agent

import (
	"fmt"
	"maps"
	"net/netip"
	"time"

	pw "github.com/podweir/podweir/internal/maps"
)

// journal records writes of all maps in order.
type journal struct {
	lines []string
	check func() // called after every single write
}

func (j *journal) add(format string, args ...any) {
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
	if j.check != nil {
		j.check()
	}
}

// mem is a map in memory whose writes are seen one by one.
type mem[K comparable, V comparable] struct {
	name string
	m    map[K]V
	size int
	j    *journal
	bad  func(K, V) error
}

func newMem[K comparable, V comparable](name string, j *journal) *mem[K, V] {
	return &mem[K, V]{name: name, m: make(map[K]V), size: 1 << 16, j: j}
}

func (s *mem[K, V]) Name() string             { return s.name }
func (s *mem[K, V]) MaxEntries() int          { return s.size }
func (s *mem[K, V]) Dump() (map[K]V, error)   { return maps.Clone(s.m), nil }
func (s *mem[K, V]) Get(k K) (V, bool, error) { v, ok := s.m[k]; return v, ok, nil }
func (s *mem[K, V]) Delete(k K) error         { delete(s.m, k); return nil }

func (s *mem[K, V]) Each(f func(K, V) error) error {
	for k, v := range s.m {
		if err := f(k, v); err != nil {
			return err
		}
	}
	return nil
}

func (s *mem[K, V]) TryPutAll(entries map[K]V) map[K]error {
	errs := make(map[K]error)
	for k, v := range entries {
		_, have := s.m[k]
		switch {
		case s.bad != nil && s.bad(k, v) != nil:
			errs[k] = s.bad(k, v)
		case !have && len(s.m) >= s.size:
			errs[k] = fmt.Errorf("%s: %w", s.name, pw.ErrFull)
		default:
			s.m[k] = v
			s.j.add("put %s %s", s.name, pw.KeyString(k))
		}
	}
	return errs
}

func (s *mem[K, V]) TryDeleteAll(keys []K) map[K]error {
	for _, k := range keys {
		delete(s.m, k)
		s.j.add("delete %s %s", s.name, pw.KeyString(k))
	}
	return nil
}

// memStores are all maps in memory.
type memStores struct {
	journal
	gens      *mem[uint32, uint32]
	services  *mem[pw.ServiceKey, pw.Service]
	backends  *mem[pw.BackendKey, pw.Backend]
	maglev    *mem[pw.MaglevKey, pw.Maglev]
	states    *mem[pw.BackendStateKey, uint32]
	ranges    *mem[pw.SrcRangeKey, uint32]
	devAddrs  *mem[uint32, pw.DevAddrs]
	nodes     *mem[uint32, pw.Node]
	nodesV6   *mem[uint32, pw.NodeV6]
	nodeIDs   *mem[pw.Addr, uint32]
	addrs     *mem[pw.Addr, pw.Peer]
	prefixes  *mem[pw.PrefixKey, pw.Peer]
	endpoints *mem[pw.Addr, pw.Endpoint]
	policy    *mem[pw.PolicyKey, pw.PolicyEntry]
	classes   *mem[uint32, uint16]
}

func newMemStores() *memStores {
	s := &memStores{}
	s.gens = newMem[uint32, uint32]("pw_gens", &s.journal)
	s.services = newMem[pw.ServiceKey, pw.Service]("pw_services", &s.journal)
	s.backends = newMem[pw.BackendKey, pw.Backend]("pw_backends", &s.journal)
	s.maglev = newMem[pw.MaglevKey, pw.Maglev]("pw_maglev", &s.journal)
	s.states = newMem[pw.BackendStateKey, uint32]("pw_backend_st", &s.journal)
	s.ranges = newMem[pw.SrcRangeKey, uint32]("pw_src_ranges", &s.journal)
	s.devAddrs = newMem[uint32, pw.DevAddrs]("pw_dev_addrs", &s.journal)
	s.nodes = newMem[uint32, pw.Node]("pw_nodes", &s.journal)
	s.nodesV6 = newMem[uint32, pw.NodeV6]("pw_node_v6", &s.journal)
	s.nodeIDs = newMem[pw.Addr, uint32]("pw_node_ids", &s.journal)
	s.addrs = newMem[pw.Addr, pw.Peer]("pw_addrs", &s.journal)
	s.prefixes = newMem[pw.PrefixKey, pw.Peer]("pw_prefixes", &s.journal)
	s.endpoints = newMem[pw.Addr, pw.Endpoint]("pw_endpoints", &s.journal)
	s.policy = newMem[pw.PolicyKey, pw.PolicyEntry]("pw_policy", &s.journal)
	s.classes = newMem[uint32, uint16]("pw_port_class", &s.journal)
	return s
}

func (s *memStores) stores() stores {
	return stores{
		gens: s.gens, services: s.services, backends: s.backends,
		maglev: s.maglev, states: s.states, ranges: s.ranges, devAddrs: s.devAddrs, nodes: s.nodes, nodesV6: s.nodesV6, nodeIDs: s.nodeIDs,
		addrs: s.addrs, prefixes: s.prefixes, endpoints: s.endpoints, policy: s.policy, classes: s.classes,
		nodesMax: 8192,
	}
}

// clock is a time that tests move.
type clock struct{ t time.Time }

func newClock() *clock                   { return &clock{time.Unix(1000, 0)} }
func (c *clock) now() time.Time          { return c.t }
func (c *clock) advance(d time.Duration) { c.t = c.t.Add(d) }

func ip(s string) pw.Addr { return pw.ToAddr(netip.MustParseAddr(s)) }

func pfx(s string) pw.PrefixKey {
	k, err := pw.ToPrefix(netip.MustParsePrefix(s))
	if err != nil {
		panic(err)
	}
	return k
}
