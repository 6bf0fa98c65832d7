package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"time"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/cniapi"
	"github.com/podweir/podweir/internal/endpoint"
)

// Agent answers the requests of package api.
type Agent interface {
	// Get decodes the answer to a GET of path.
	Get(ctx context.Context, path string, into any) error
	// Stream calls each with every line of the answer to a GET of path, as
	// they come. It returns what each returns, or nil when the agent ends the
	// answer.
	Stream(ctx context.Context, path string, each func(json.RawMessage) error) error
}

// agentTimeout bounds a request: a stuck agent must not hang a command that
// can do without it.
const agentTimeout = 3 * time.Second

// DialAgent returns the agent that listens on a unix socket. It connects
// with the first request.
func DialAgent(socket string) Agent {
	return socketAgent{socket, &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		ResponseHeaderTimeout: agentTimeout,
	}}
}

type socketAgent struct {
	socket    string
	transport *http.Transport
}

func (a socketAgent) Get(ctx context.Context, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	return a.read(ctx, path, func(d *json.Decoder) error { return d.Decode(into) })
}

func (a socketAgent) Stream(ctx context.Context, path string, each func(json.RawMessage) error) error {
	return a.read(ctx, path, func(d *json.Decoder) error {
		for {
			var line json.RawMessage
			if err := d.Decode(&line); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			if err := each(line); err != nil {
				return err
			}
		}
	})
}

// read hands the body of an answer to decode.
func (a socketAgent) read(ctx context.Context, path string, decode func(*json.Decoder) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: a.transport}).Do(req)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return &agentDownError{fmt.Errorf("no permission for the agent's socket %s; run as root", a.socket)}
	case err != nil:
		// The dialer's error says what failed; the URL around it says nothing.
		if op := (*net.OpError)(nil); errors.As(err, &op) {
			err = op.Err
		}
		return &agentDownError{fmt.Errorf("the agent does not answer on %s (%w); start it, or pass its socket with --socket", a.socket, err)}
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode >= 400 {
		var e api.Error
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		if json.Unmarshal(body, &e) != nil || e.Message == "" {
			e.Message = resp.Status
		}
		return fmt.Errorf("agent on %s: %s: %s", a.socket, path, e.Message)
	}
	if err := decode(json.NewDecoder(resp.Body)); err != nil {
		return fmt.Errorf("agent on %s: %s: %w", a.socket, path, err)
	}
	return nil
}

// agentDownError: no agent answers, so that asking on is useless.
type agentDownError struct{ err error }

func (e *agentDownError) Error() string { return e.err.Error() }
func (e *agentDownError) Unwrap() error { return e.err }

// plugged asks the agent what the runtime's CHECK does.
func plugged(socket string) func(context.Context, api.Endpoint) error {
	client := cniapi.NewClient(socket)
	return func(ctx context.Context, ep api.Endpoint) error {
		ctx, cancel := context.WithTimeout(ctx, agentTimeout)
		defer cancel()
		err := client.Check(ctx, endpoint.Request{ContainerID: ep.ContainerID, IfName: ep.IfName})
		switch e := endpoint.AsError(err); {
		case e == nil, e.Code == endpoint.CodeUnknownContainer: // it went meanwhile
			return nil
		case e.Code == endpoint.CodeDiffers:
			return errors.New(e.Details)
		}
		return err
	}
}
