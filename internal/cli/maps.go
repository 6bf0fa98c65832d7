package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/podweir/podweir/internal/maps"
)

// Maps is what the commands read of the datapath.
type Maps interface {
	// Flows returns the confirmed and the not yet confirmed entries.
	Flows() (confirmed, unconfirmed map[maps.FlowKey]maps.Flow, err error)
	// Generation returns the present generation of a slot.
	Generation(slot uint32) (uint32, error)
	Services() (map[maps.ServiceKey]maps.Service, error)
	Backends() (map[maps.BackendKey]maps.Backend, error)
	SrcRanges() (map[maps.SrcRangeKey]uint32, error)
	Endpoints() (map[maps.Addr]maps.Endpoint, error)
	Addrs() (map[maps.Addr]maps.Peer, error)
	Prefixes() (map[maps.PrefixKey]maps.Peer, error)
	// Nodes returns the node ids in use.
	Nodes() (map[uint32]maps.Node, error)
	NodeIDs() (map[maps.Addr]uint32, error)
	Policy() (map[maps.PolicyKey]maps.PolicyEntry, error)
	// PortClasses returns the class of every port, by port.
	PortClasses() ([]uint16, error)
	Metrics() ([]maps.Sample, error)
	// Ask has the datapath decide about a packet, see [maps.Asker].
	Ask(maps.Ask) (maps.Ask, error)
	// Usage returns how full the maps are.
	Usage() ([]MapUsage, error)
	Close() error
}

// MapUsage is how full a map is.
type MapUsage struct {
	Name    string `json:"name"`
	Entries int    `json:"entries"`
	Max     int    `json:"max"`
	Evicted uint64 `json:"evicted,omitempty"` // pw_flows_new: pushed out since the maps were made
}

// OpenMaps opens the maps pinned under the folder bpffs, read-only.
func OpenMaps(bpffs string) (Maps, error) {
	set, err := maps.OpenPinned(filepath.Join(bpffs, "maps"), true)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &exitError{exitNoMaps, fmt.Errorf("no datapath under %s; start the agent, or pass its folder with --bpffs: %w", bpffs, err)}
	case errors.Is(err, fs.ErrPermission):
		return nil, &exitError{exitPermission, fmt.Errorf("no permission to read the maps under %s; run as root: %w", bpffs, err)}
	case err != nil:
		return nil, fmt.Errorf("reading the maps under %s: %w", bpffs, err)
	}
	return pinned{set, bpffs}, nil
}

// pinned reads a set of pinned maps.
type pinned struct {
	set   maps.Set
	bpffs string
}

func (p pinned) Flows() (confirmed, unconfirmed map[maps.FlowKey]maps.Flow, err error) {
	// Unconfirmed first: what is confirmed between the two reads is seen
	// twice, not missed.
	if unconfirmed, err = p.set.FlowsNew.Dump(); err != nil {
		return nil, nil, err
	}
	confirmed, err = p.set.Flows.Dump()
	return confirmed, unconfirmed, err
}

func (p pinned) Generation(slot uint32) (uint32, error) {
	gen, ok, err := p.set.Gens.Get(slot)
	if err == nil && !ok {
		err = fmt.Errorf("pw_gens: slot %d is beyond its end", slot)
	}
	return gen, err
}

func (p pinned) Services() (map[maps.ServiceKey]maps.Service, error)  { return p.set.Services.Dump() }
func (p pinned) Backends() (map[maps.BackendKey]maps.Backend, error)  { return p.set.Backends.Dump() }
func (p pinned) SrcRanges() (map[maps.SrcRangeKey]uint32, error)      { return p.set.SrcRanges.Dump() }
func (p pinned) Endpoints() (map[maps.Addr]maps.Endpoint, error)      { return p.set.Endpoints.Dump() }
func (p pinned) Addrs() (map[maps.Addr]maps.Peer, error)              { return p.set.Addrs.Dump() }
func (p pinned) Prefixes() (map[maps.PrefixKey]maps.Peer, error)      { return p.set.Prefixes.Dump() }
func (p pinned) NodeIDs() (map[maps.Addr]uint32, error)               { return p.set.NodeIDs.Dump() }
func (p pinned) Policy() (map[maps.PolicyKey]maps.PolicyEntry, error) { return p.set.Policy.Dump() }
func (p pinned) Metrics() ([]maps.Sample, error)                      { return p.set.Metrics.Read() }
func (p pinned) Close() error                                         { return p.set.Close() }

func (p pinned) Ask(q maps.Ask) (maps.Ask, error) {
	a, err := maps.OpenAsker(filepath.Join(p.bpffs, "programs"))
	if err != nil {
		return q, err
	}
	q, err = a.Ask(q)
	return q, errors.Join(err, a.Close())
}

func (p pinned) Nodes() (map[uint32]maps.Node, error) {
	out := map[uint32]maps.Node{}
	err := p.set.Nodes.Each(func(id uint32, n maps.Node) error {
		// Index 0 is this node's own address, no id.
		if id != 0 && n.Addr != (maps.Addr{}) {
			out[id] = n
		}
		return nil
	})
	return out, err
}

func (p pinned) PortClasses() ([]uint16, error) {
	out := make([]uint16, 65536)
	err := p.set.PortClass.Each(func(port uint32, class uint16) error {
		if int(port) < len(out) {
			out[port] = class
		}
		return nil
	})
	return out, err
}

func (p pinned) Usage() ([]MapUsage, error) {
	var out []MapUsage
	var errs []error
	s := p.set
	out = append(out, usage(s.Flows, &errs), p.usageNew(&errs), usage(s.Services, &errs),
		usage(s.Backends, &errs), usage(s.Maglev, &errs), usage(s.BackendStates, &errs), usage(s.SrcRanges, &errs),
		usage(s.Affinity, &errs), usage(s.AffinityIn, &errs), usage(s.Endpoints, &errs), usage(s.Addrs, &errs), usage(s.Prefixes, &errs),
		usage(s.NodeIDs, &errs), usage(s.Policy, &errs))
	return out, errors.Join(errs...)
}

// usageNew is how full pw_flows_new is and how many it has pushed out.
func (p pinned) usageNew(errs *[]error) MapUsage {
	before, err1 := p.set.Churn.Read()
	u := usage(p.set.FlowsNew, errs)
	after, err2 := p.set.Churn.Read()
	if err := errors.Join(err1, err2); err != nil {
		*errs = append(*errs, err)
		return u
	}
	u.Evicted, _ = maps.Evicted(before, after, uint64(u.Entries))
	return u
}

func usage[K comparable, V any](m maps.Map[K, V], errs *[]error) MapUsage {
	u := MapUsage{Name: m.Name(), Max: m.MaxEntries()}
	err := m.Each(func(K, V) error {
		u.Entries++
		return nil
	})
	if err != nil {
		*errs = append(*errs, err)
	}
	return u
}
