package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netns"

	"github.com/podweir/podweir/internal/ipam"
)

// undoTimeout bounds deletions and the undoing of a failed Add, which go on
// when the caller has given up.
const undoTimeout = 30 * time.Second

// Config is what a [Manager] works with; every field that is not said to be
// optional is required, Log, MTU6, Sysctls and Step are not.
type Config struct {
	StateDir    string          // files of the endpoints live under it
	IPAM        *ipam.Allocator // the agent sets its CIDRs and node addresses
	Datapath    Datapath
	Regenerator Regenerator
	MTU         func() int // of new pods
	MTU6        func() int // of their IPv6 routes; nil = that of the interface
	Sysctls     string     // where /proc/sys can be written; empty = there
	Log         *slog.Logger
	Step        func(step string) // tests follow, and end, an operation by it; nil = nobody does
}

// Manager makes and removes endpoints. Its methods may be called at any time
// from any goroutine.
type Manager struct {
	cfg   Config
	log   *slog.Logger
	store *store
	host  netns.NsHandle
	locks keyLock // by name of the host interface
	turns turns
	setup []error // found by New, reported by Restore

	restoreOnce sync.Once
	restored    chan struct{} // closed when Restore is through

	mu      sync.Mutex
	eps     map[Key]*entry
	lastID  uint32
	orphans map[string][]netip.Addr // host interfaces of ours whose state is lost

}

// entry is one endpoint; who holds the lock of its host interface may change
// it, under mu too.
type entry struct {
	rec      record
	attached bool // the datapath has its programs in place
	up       bool // the regenerator has it in force

	leaving int    // deletions that wait for the lock, or have it
	giveUp  func() // ends the wait for policy that runs; nil = none does
}

// change changes e under the manager's mutex.
func (m *Manager) change(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// New reads the state on disk, reserves the addresses found there and sets
// corrupted files aside. [Manager.List] is complete afterwards. It calls
// neither the datapath nor the regenerator.
func New(cfg Config) (*Manager, error) {
	if cfg.StateDir == "" || cfg.IPAM == nil || cfg.Datapath == nil || cfg.Regenerator == nil || cfg.MTU == nil {
		return nil, errors.New("endpoint manager: every field of its configuration but the log and the folder of sysctls is required")
	}
	m := &Manager{
		cfg: cfg, log: cfg.Log,
		restored: make(chan struct{}),
		eps:      map[Key]*entry{},
		orphans:  map[string][]netip.Addr{},
	}
	if m.log == nil {
		m.log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	var err error
	if m.store, err = openStore(cfg.StateDir, m.step); err != nil {
		return nil, err
	}
	if m.host, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("the host's network namespace: %w", err)
	}
	m.load()
	if err := m.findOrphans(); err != nil {
		return nil, errors.Join(err, m.host.Close())
	}
	return m, nil
}

// Close releases the manager's handles; endpoints stay as they are.
func (m *Manager) Close() error { return m.host.Close() }

// List returns the endpoints that are up, ordered by id.
func (m *Manager) List() []Endpoint {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Endpoint
	for _, e := range m.eps {
		if e.rec.Phase == phaseReady {
			out = append(out, e.rec.Endpoint)
		}
	}
	slices.SortFunc(out, func(a, b Endpoint) int { return int(a.ID) - int(b.ID) })
	return out
}

// Status returns an error if Add cannot work now. Its code says whether the
// pods that are there may be cut off as well. While the agent starts they are
// not: what is in force stays.
func (m *Manager) Status() error {
	select {
	case <-m.restored:
	default:
		return errorf(CodeNotAvailable, "the agent is starting: wait until it is ready")
	}
	err := m.cfg.IPAM.Ready()
	if err == nil {
		return nil
	}
	if cut := m.cutOff(); len(cut) > 0 {
		return &Error{Code: CodeLimited, Msg: err.Error(), Details: "cut off: " + strings.Join(cut, ", "), err: err}
	}
	return errorf(CodeNotAvailable, "%w", err)
}

// cutOff names the endpoints that should be in force and are not.
func (m *Manager) cutOff() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, e := range m.eps {
		if e.rec.Phase == phaseReady && !(e.attached && e.up) {
			out = append(out, e.rec.Endpoint.String())
		}
	}
	slices.Sort(out)
	return out
}

func (m *Manager) get(k Key) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.eps[k]
}

// byHostIf returns the endpoint that owns a host interface, or nil.
func (m *Manager) byHostIf(name string) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.eps {
		if e.rec.Endpoint.HostIfName == name {
			return e
		}
	}
	return nil
}

// copyOf returns what e holds now.
func (m *Manager) copyOf(e *entry) entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	return *e
}

func (m *Manager) endpointOf(e *entry) Endpoint { return m.copyOf(e).rec.Endpoint }

func (m *Manager) phaseOf(e *entry) phase { return m.copyOf(e).rec.Phase }

// save writes e's file in the given phase; memory follows only if that
// worked.
func (m *Manager) save(e *entry, ep Endpoint, p phase) error {
	rec := record{Phase: p, Endpoint: ep}
	if err := m.store.put(rec); err != nil {
		return errorf(CodeIO, "%w", err)
	}
	m.change(func() { e.rec = rec })
	return nil
}

// owner names an endpoint to the allocator.
func owner(ep Endpoint) string { return ep.String() }

// lockPod waits for the lock of a host interface.
func (m *Manager) lockPod(ctx context.Context, hostIf string) (func(), error) {
	unlock, err := m.locks.lock(ctx, hostIf)
	if err != nil {
		return nil, errorf(CodeTryAgain, "another operation on %s takes too long: %w", hostIf, err)
	}
	return unlock, nil
}
