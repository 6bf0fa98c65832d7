package health

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// headerTimeout bounds how long a client may take to ask.
const headerTimeout = 5 * time.Second

// Check is what one Service asks for.
type Check struct {
	// Port is its healthCheckNodePort.
	Port uint16
	// Local is the number of its ready endpoints on this node.
	Local int
}

// Checks are the servers for the health checks of Services. Sync and Close
// are for one goroutine.
type Checks struct {
	healthy func() bool
	servers map[checkKey]*checkServer
}

// checkKey: the zero address stands for all addresses of the node.
type checkKey struct {
	service types.NamespacedName
	at      netip.AddrPort
}

type checkServer struct {
	local atomic.Int64
	http  *http.Server
	ended chan struct{} // closed when it serves no more
}

// NewChecks makes Checks without a server; healthy says how the proxy does.
func NewChecks(healthy func() bool) *Checks {
	return &Checks{healthy: healthy, servers: make(map[checkKey]*checkServer)}
}

// Sync makes servers so that there is one for each Service of want on each of
// addrs; no addrs = on all of the node. It returns what could not be listened
// on, by Service.
func (c *Checks) Sync(want map[types.NamespacedName]Check, addrs []netip.Addr) map[types.NamespacedName]error {
	if len(addrs) == 0 {
		addrs = []netip.Addr{{}}
	}
	wanted := make(map[checkKey]int)
	for name, check := range want {
		for _, a := range addrs {
			wanted[checkKey{name, netip.AddrPortFrom(a, check.Port)}] = check.Local
		}
	}
	// First what goes: another Service may have its port in this very call.
	for key, s := range c.servers {
		if _, ok := wanted[key]; !ok || s.dead() {
			s.close()
			delete(c.servers, key)
		}
	}
	errs := make(map[types.NamespacedName]error)
	for _, key := range inOrder(wanted) {
		s := c.servers[key]
		if s == nil {
			var err error
			if s, err = c.serve(key, wanted[key]); err != nil {
				errs[key.service] = errors.Join(errs[key.service], err)
				continue
			}
			c.servers[key] = s
		}
		s.local.Store(int64(wanted[key]))
	}
	return errs
}

// inOrder: of two Services that want one port, the first by name gets it,
// unless the other has it already.
func inOrder(wanted map[checkKey]int) []checkKey {
	keys := make([]checkKey, 0, len(wanted))
	for k := range wanted {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b checkKey) int {
		return cmp.Or(cmp.Compare(a.service.String(), b.service.String()), a.at.Compare(b.at))
	})
	return keys
}

func (c *Checks) serve(key checkKey, local int) (*checkServer, error) {
	for other := range c.servers {
		if other.at == key.at {
			return nil, fmt.Errorf("healthCheckNodePort %d is that of Service %s already; give one of them another port", key.at.Port(), other.service)
		}
	}
	host := ""
	if key.at.Addr().IsValid() {
		host = key.at.Addr().String()
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(int(key.at.Port()))))
	if err != nil {
		return nil, fmt.Errorf("healthCheckNodePort %d: %w; load balancers take this node for one without endpoints until the port is free, it is tried again", key.at.Port(), err)
	}
	s := &checkServer{ended: make(chan struct{})}
	s.local.Store(int64(local))
	s.http = &http.Server{ReadHeaderTimeout: headerTimeout, Handler: c.handler(key.service, &s.local)}
	go func() {
		defer close(s.ended)
		_ = s.http.Serve(l) // however it ended: the next Sync makes another if one is wanted
	}()
	return s, nil
}

func (s *checkServer) dead() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// Lost says whether a server ended by itself; Sync makes a new one.
func (c *Checks) Lost() bool {
	for _, s := range c.servers {
		if s.dead() {
			return true
		}
	}
	return false
}

// close returns when the port is free.
func (s *checkServer) close() {
	_ = s.http.Close() // what else there is to do about a socket
	<-s.ended
}

// Close stops every server.
func (c *Checks) Close() {
	for key, s := range c.servers {
		s.close()
		delete(c.servers, key)
	}
}

type checkAnswer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// handler answers on every path.
func (c *Checks) handler(name types.NamespacedName, local *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		a := checkAnswer{LocalEndpoints: int(local.Load()), ServiceProxyHealthy: c.healthy()}
		a.Service.Namespace, a.Service.Name = name.Namespace, name.Name
		code := http.StatusServiceUnavailable
		if a.LocalEndpoints > 0 && a.ServiceProxyHealthy {
			code = http.StatusOK
		}
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(a.LocalEndpoints))
		writeJSON(w, code, a)
	}
}
