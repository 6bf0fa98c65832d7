package apiserver

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync/atomic"
)

// failover sends requests to one of several servers.
type failover struct {
	servers []*url.URL
	current atomic.Int64
}

func (f *failover) wrap(next http.RoundTripper) http.RoundTripper {
	return &failoverTrip{f, next}
}

// failoverTrip is one client's way: all clients of a configuration share what
// is known of the servers.
type failoverTrip struct {
	*failover
	next http.RoundTripper
}

// WrappedRoundTripper lets client-go find the transport, to close its
// connections.
func (f *failoverTrip) WrappedRoundTripper() http.RoundTripper { return f.next }

func (f *failoverTrip) RoundTrip(req *http.Request) (*http.Response, error) {
	var errs []error
	for range f.servers {
		at := f.current.Load()
		server := f.servers[at]
		to := req.Clone(req.Context())
		to.URL.Scheme, to.URL.Host, to.Host = server.Scheme, server.Host, ""
		resp, err := f.next.RoundTrip(to)
		if err == nil {
			switch resp.StatusCode {
			case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
				f.leave(at)
			}
			return resp, nil
		}
		if req.Context().Err() != nil {
			return nil, err
		}
		f.leave(at)
		errs = append(errs, fmt.Errorf("%s: %w", server, err))
		if req.Body != nil && req.Body != http.NoBody {
			break // it may be read already
		}
	}
	return nil, errors.Join(errs...)
}

// leave has requests go to the server after this one, unless they do not go
// to this one any more.
func (f *failover) leave(at int64) {
	f.current.CompareAndSwap(at, (at+1)%int64(len(f.servers)))
}
