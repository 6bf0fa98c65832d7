package cniapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/podweir/podweir/internal/endpoint"
)

const (
	pathAdd    = "/v1/cni/add"
	pathDel    = "/v1/cni/del"
	pathCheck  = "/v1/cni/check"
	pathGC     = "/v1/cni/gc"
	pathStatus = "/v1/cni/status"

	// timeoutHeader says how many milliseconds the client waits.
	timeoutHeader = "Podweir-Timeout-Ms"
	maxTimeout    = 10 * time.Minute

	maxBody   = 64 << 10
	maxGCBody = 4 << 20 // some 20,000 attachments
)

type gcRequest struct {
	Network string         `json:"network"`
	Valid   []endpoint.Key `json:"valid"`
}

type empty struct{}

// Handler answers the plugin's requests through m.
func Handler(m *endpoint.Manager) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST "+pathAdd, serve(maxBody, m.Add))
	mux.Handle("POST "+pathDel, serve(maxBody, func(ctx context.Context, r endpoint.Request) (empty, error) {
		return empty{}, m.Del(ctx, r)
	}))
	mux.Handle("POST "+pathCheck, serve(maxBody, func(ctx context.Context, r endpoint.Request) (empty, error) {
		return empty{}, m.Check(ctx, r)
	}))
	mux.Handle("POST "+pathGC, serve(maxGCBody, func(ctx context.Context, r gcRequest) (empty, error) {
		if r.Valid == nil {
			return empty{}, &endpoint.Error{Code: endpoint.CodeBadRequest, Msg: `"valid" is missing: an empty list removes every endpoint`}
		}
		return empty{}, m.GC(ctx, r.Network, r.Valid)
	}))
	mux.HandleFunc("GET "+pathStatus, func(w http.ResponseWriter, _ *http.Request) {
		reply(w, empty{}, m.Status())
	})
	return mux
}

// serve decodes a request, calls f within the client's time and replies.
func serve[Req, Resp any](limit int64, f func(context.Context, Req) (Resp, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Reading to the end lets the server notice when the client goes.
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
		var req Req
		if err == nil {
			err = json.Unmarshal(body, &req)
		}
		if err != nil {
			reply(w, empty{}, &endpoint.Error{Code: endpoint.CodeDecode, Msg: fmt.Sprintf("request %s: %v", r.URL.Path, err)})
			return
		}
		timeout := maxTimeout
		if ms, err := strconv.ParseInt(r.Header.Get(timeoutHeader), 10, 64); err == nil && ms > 0 {
			timeout = min(timeout, time.Duration(min(ms, maxTimeout.Milliseconds()))*time.Millisecond)
		}
		ctx, cancel := context.WithTimeout(r.Context(), timeout)
		defer cancel()
		resp, err := f(ctx, req)
		reply(w, resp, err)
	})
}

// reply writes v or err. A client that is gone does not get either; ADD that
// it will not hear of is removed by the DEL that the runtime owes.
func reply(w http.ResponseWriter, v any, err error) {
	status := http.StatusOK
	if e := endpoint.AsError(err); e != nil {
		status, v = httpStatus(e.Code), e
	}
	data, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data)
}

func httpStatus(c endpoint.Code) int {
	switch c {
	case endpoint.CodeBadRequest, endpoint.CodeDecode, endpoint.CodeBadNetns:
		return http.StatusBadRequest
	case endpoint.CodeUnknownContainer:
		return http.StatusNotFound
	case endpoint.CodeExists, endpoint.CodeAddress, endpoint.CodeDiffers, endpoint.CodeHostPort:
		return http.StatusConflict
	case endpoint.CodeTryAgain, endpoint.CodeNotAvailable, endpoint.CodeExhausted:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// Listen opens a unix socket that only its owner may use. It takes the place
// of a socket that nobody listens on any more; a live one is an error.
func Listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	if conn, err := net.Dial("unix", path); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("socket %s: another process listens on it", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("socket %s: a file that is no socket is in the way", path)
	}
	// Its final name appears only when its mode is right.
	temp := path + "~"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l, err := net.Listen("unix", temp)
	if err != nil {
		if errors.Is(err, syscall.EINVAL) {
			err = fmt.Errorf("the path is too long for a socket: %w", err)
		}
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	unix := l.(*net.UnixListener)
	unix.SetUnlinkOnClose(false)
	err = os.Chmod(temp, 0o600)
	var own fs.FileInfo
	if err == nil {
		own, err = os.Lstat(temp)
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", path, err), l.Close(), os.Remove(temp))
	}
	return &listener{UnixListener: unix, path: path, own: own}, nil
}

// listener removes its socket when it is closed, unless a successor has put
// its own there.
type listener struct {
	*net.UnixListener
	path string
	own  fs.FileInfo
	once sync.Once
}

func (l *listener) Close() error {
	l.once.Do(func() {
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.own) {
			_ = os.Remove(l.path)
		}
	})
	return l.UnixListener.Close()
}
