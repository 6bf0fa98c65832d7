package maps

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/podweir/podweir/internal/bpf"
)

// Set is all maps of the datapath.
type Set struct {
	Flows         Map[FlowKey, Flow]
	FlowsNew      Map[FlowKey, Flow]
	Gens          Map[uint32, uint32]
	Services      Map[ServiceKey, Service]
	Backends      Map[BackendKey, Backend]
	Endpoints     Map[Addr, Endpoint]
	Addrs         Map[Addr, Peer]
	Prefixes      Map[PrefixKey, Peer]
	Nodes         Map[uint32, Node]
	NodesV6       Map[uint32, NodeV6]
	NodeIDs       Map[Addr, uint32]
	Policy        Map[PolicyKey, PolicyEntry]
	PortClass     Map[uint32, uint16]
	BackendStates Map[BackendStateKey, uint32]
	Maglev        Map[MaglevKey, Maglev]
	Affinity      Map[AffinityKey, Affinity] // of clients outside
	AffinityIn    Map[AffinityKey, Affinity] // of this node's pods and processes
	SrcRanges     Map[SrcRangeKey, uint32]
	DevAddrs      Map[uint32, DevAddrs]
	Filtered      Map[uint32, uint32]     // a pod's veth -> the device over it, and back
	SockRev       Map[uint64, SockAsked]  // by socket cookie
	Frags         Map[FragKey, Frag]      // datagrams in fragments
	FragOrigins   Map[uint32, FragOrigin] // what those in the reassembly were
	Churn         *Churn
	Metrics       *Metrics
	Events        *Events // of [NewSet] alone: nobody else may read them
}

// NewSet wraps the maps of a loaded collection, which keeps owning them.
func NewSet(o *bpf.DpMaps) Set {
	return Set{
		Flows:         Wrap[FlowKey, Flow](o.PwFlows, bpf.DpMapPwFlows),
		FlowsNew:      Wrap[FlowKey, Flow](o.PwFlowsNew, bpf.DpMapPwFlowsNew),
		Gens:          Wrap[uint32, uint32](o.PwGens, bpf.DpMapPwGens),
		Services:      Wrap[ServiceKey, Service](o.PwServices, bpf.DpMapPwServices),
		Backends:      Wrap[BackendKey, Backend](o.PwBackends, bpf.DpMapPwBackends),
		Endpoints:     Wrap[Addr, Endpoint](o.PwEndpoints, bpf.DpMapPwEndpoints),
		Addrs:         Wrap[Addr, Peer](o.PwAddrs, bpf.DpMapPwAddrs).ordered(compareAddrs),
		Prefixes:      Wrap[PrefixKey, Peer](o.PwPrefixes, bpf.DpMapPwPrefixes).ordered(comparePrefixes),
		Nodes:         Wrap[uint32, Node](o.PwNodes, bpf.DpMapPwNodes),
		NodesV6:       Wrap[uint32, NodeV6](o.PwNodeV6, bpf.DpMapPwNodeV6),
		NodeIDs:       Wrap[Addr, uint32](o.PwNodeIds, bpf.DpMapPwNodeIds),
		Policy:        Wrap[PolicyKey, PolicyEntry](o.PwPolicy, bpf.DpMapPwPolicy).ordered(comparePolicy),
		PortClass:     Wrap[uint32, uint16](o.PwPortClass, bpf.DpMapPwPortClass),
		BackendStates: Wrap[BackendStateKey, uint32](o.PwBackendSt, bpf.DpMapPwBackendSt),
		Maglev:        Wrap[MaglevKey, Maglev](o.PwMaglev, bpf.DpMapPwMaglev),
		Affinity:      Wrap[AffinityKey, Affinity](o.PwAffinity, bpf.DpMapPwAffinity),
		AffinityIn:    Wrap[AffinityKey, Affinity](o.PwAffinityIn, bpf.DpMapPwAffinityIn),
		SrcRanges:     Wrap[SrcRangeKey, uint32](o.PwSrcRanges, bpf.DpMapPwSrcRanges),
		DevAddrs:      Wrap[uint32, DevAddrs](o.PwDevAddrs, bpf.DpMapPwDevAddrs),
		Filtered:      Wrap[uint32, uint32](o.PwFiltered, bpf.DpMapPwFiltered),
		SockRev:       Wrap[uint64, SockAsked](o.PwSockRev, bpf.DpMapPwSockRev),
		Frags:         Wrap[FragKey, Frag](o.PwFrags, bpf.DpMapPwFrags),
		FragOrigins:   Wrap[uint32, FragOrigin](o.PwFragOrigins, bpf.DpMapPwFragOrigins),
		Churn:         NewChurn(o.PwChurn),
		Metrics:       NewMetrics(o.PwMetrics),
		Events:        NewEvents(o.PwEvents),
	}
}

// Of tables that do not all fit the older ones are whole.
func comparePolicy(a, b PolicyKey) int {
	return cmp.Or(cmp.Compare(a.Table, b.Table), cmp.Compare(a.Identity, b.Identity), cmp.Compare(a.Kind, b.Kind),
		cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.Port, b.Port))
}

func compareAddrs(a, b Addr) int { return bytes.Compare(a.B[:], b.B[:]) }

func comparePrefixes(a, b PrefixKey) int {
	return cmp.Or(cmp.Compare(a.Len, b.Len), bytes.Compare(a.Addr[:], b.Addr[:]))
}

// OpenPinned opens the maps that an agent pinned in dir (<bpffs>/maps). The
// caller closes the set. An error that wraps [fs.ErrNotExist] means that no
// agent has run over this folder.
func OpenPinned(dir string, readOnly bool) (Set, error) {
	var (
		o      bpf.DpMaps
		opened []io.Closer
	)
	for _, p := range []struct {
		name string
		dst  **ebpf.Map
	}{
		{bpf.DpMapPwFlows, &o.PwFlows},
		{bpf.DpMapPwFlowsNew, &o.PwFlowsNew},
		{bpf.DpMapPwGens, &o.PwGens},
		{bpf.DpMapPwServices, &o.PwServices},
		{bpf.DpMapPwBackends, &o.PwBackends},
		{bpf.DpMapPwEndpoints, &o.PwEndpoints},
		{bpf.DpMapPwAddrs, &o.PwAddrs},
		{bpf.DpMapPwPrefixes, &o.PwPrefixes},
		{bpf.DpMapPwNodes, &o.PwNodes},
		{bpf.DpMapPwNodeV6, &o.PwNodeV6},
		{bpf.DpMapPwNodeIds, &o.PwNodeIds},
		{bpf.DpMapPwPolicy, &o.PwPolicy},
		{bpf.DpMapPwPortClass, &o.PwPortClass},
		{bpf.DpMapPwBackendSt, &o.PwBackendSt},
		{bpf.DpMapPwMaglev, &o.PwMaglev},
		{bpf.DpMapPwAffinity, &o.PwAffinity},
		{bpf.DpMapPwAffinityIn, &o.PwAffinityIn},
		{bpf.DpMapPwSrcRanges, &o.PwSrcRanges},
		{bpf.DpMapPwDevAddrs, &o.PwDevAddrs},
		{bpf.DpMapPwFiltered, &o.PwFiltered},
		{bpf.DpMapPwSockRev, &o.PwSockRev},
		{bpf.DpMapPwFrags, &o.PwFrags},
		{bpf.DpMapPwFragOrigins, &o.PwFragOrigins},
		{bpf.DpMapPwChurn, &o.PwChurn},
		{bpf.DpMapPwMetrics, &o.PwMetrics},
	} {
		path := filepath.Join(dir, p.name)
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: readOnly})
		if err != nil {
			for _, c := range opened {
				err = errors.Join(err, c.Close())
			}
			if errors.Is(err, fs.ErrNotExist) {
				return Set{}, fmt.Errorf("map %s is not there; has podweir-agent run with this bpffs folder? %w", path, err)
			}
			return Set{}, fmt.Errorf("open pinned map %s: %w", path, err)
		}
		*p.dst = m
		opened = append(opened, m)
	}
	return NewSet(&o), nil
}

// Capacities are the entries that maps have room for, by name: of all that can
// be full, and not of arrays of counters and the ring of events.
func (s Set) Capacities() map[string]int {
	out := map[string]int{}
	for _, m := range []interface {
		Name() string
		MaxEntries() int
	}{
		s.Flows, s.FlowsNew, s.Gens, s.Services, s.Backends, s.Endpoints, s.Addrs, s.Prefixes, s.Nodes, s.NodesV6, s.NodeIDs,
		s.Policy, s.PortClass, s.BackendStates, s.Maglev, s.Affinity, s.AffinityIn, s.SrcRanges, s.DevAddrs, s.Filtered, s.SockRev, s.Frags, s.FragOrigins,
	} {
		out[m.Name()] = m.MaxEntries()
	}
	return out
}

// Close closes the file descriptors of every map.
func (s Set) Close() error {
	return errors.Join(s.Flows.Close(), s.FlowsNew.Close(), s.Gens.Close(), s.Services.Close(),
		s.Backends.Close(), s.Endpoints.Close(), s.Addrs.Close(), s.Prefixes.Close(), s.Nodes.Close(),
		s.NodesV6.Close(), s.NodeIDs.Close(), s.Policy.Close(), s.PortClass.Close(),
		s.BackendStates.Close(), s.Maglev.Close(), s.Affinity.Close(), s.AffinityIn.Close(), s.SrcRanges.Close(),
		s.DevAddrs.Close(), s.Filtered.Close(), s.SockRev.Close(), s.Frags.Close(), s.FragOrigins.Close(), s.Churn.Close(), s.Metrics.Close(), s.Events.Close())
}
