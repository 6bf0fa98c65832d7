package cniapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
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

	maxBody   = 1 << 20 // some 10,000 port mappings
	maxGCBody = 4 << 20 // some 20,000 attachments
)

// bodyLimit is how many bytes a request may have.
func bodyLimit(path string) int {
	if path == pathGC {
		return maxGCBody
	}
	return maxBody
}

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
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			err = fmt.Errorf("it is too large: %d bytes are possible", large.Limit)
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
	case endpoint.CodeTryAgain, endpoint.CodeNotAvailable, endpoint.CodeLimited, endpoint.CodeExhausted:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}
