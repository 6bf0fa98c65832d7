package cniapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/podweir/podweir/internal/endpoint"
)

// ErrUnreachable is wrapped by errors that say that no agent answered: none
// listens, or it ended before it replied.
var ErrUnreachable = errors.New("the podweir agent does not answer")

// Client asks the agent behind one socket.
type Client struct {
	socket string
	http   http.Client
}

// NewClient returns a client of the agent that listens on socket.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return &Client{
		socket: socket,
		http:   http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}},
	}
}

// Add asks for an endpoint.
func (c *Client) Add(ctx context.Context, req endpoint.Request) (endpoint.Endpoint, error) {
	var ep endpoint.Endpoint
	err := c.call(ctx, http.MethodPost, pathAdd, req, &ep)
	return ep, err
}

// Del asks to remove an endpoint. Nothing that does not serve this is sent: it
// must not be able to stand in the way.
func (c *Client) Del(ctx context.Context, req endpoint.Request) error {
	only := endpoint.Request{ContainerID: req.ContainerID, IfName: req.IfName}
	if len(req.Namespace) <= maxName && len(req.Pod) <= maxName {
		only.Namespace, only.Pod = req.Namespace, req.Pod
	}
	return c.call(ctx, http.MethodPost, pathDel, only, &empty{})
}

// maxName is what a name of Kubernetes has at most. No pod has a longer one.
const maxName = 253

// Check asks whether an endpoint is as it was made.
func (c *Client) Check(ctx context.Context, req endpoint.Request) error {
	return c.call(ctx, http.MethodPost, pathCheck, req, &empty{})
}

// GC asks to remove every endpoint of a network that is not in valid.
func (c *Client) GC(ctx context.Context, network string, valid []endpoint.Key) error {
	if valid == nil {
		valid = []endpoint.Key{}
	}
	return c.call(ctx, http.MethodPost, pathGC, gcRequest{network, valid}, &empty{})
}

// Status asks whether Add can work.
func (c *Client) Status(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, pathStatus, empty{}, &empty{})
}

func (c *Client) call(ctx context.Context, method, path string, req, resp any) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	if limit := bodyLimit(path); len(body) > limit {
		return &endpoint.Error{Code: endpoint.CodeDecode, Msg: fmt.Sprintf("request %s is too large: %d bytes, %d are possible", path, len(body), limit)}
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok {
		// The agent gives up a little earlier, so that its reason arrives.
		left := time.Until(deadline)
		left -= min(left/10, time.Second)
		r.Header.Set(timeoutHeader, strconv.FormatInt(max(1, left.Milliseconds()), 10))
	}
	answer, err := c.http.Do(r)
	if err != nil {
		return c.failed(ctx, err)
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err != nil {
		return c.failed(ctx, err)
	}
	if answer.StatusCode != http.StatusOK {
		e := &endpoint.Error{}
		if json.Unmarshal(data, e) != nil || e.Code == 0 {
			return fmt.Errorf("the agent at %s answers %s to %s: are plugin and agent of one version?", c.socket, answer.Status, path)
		}
		return e
	}
	if err := json.Unmarshal(data, resp); err != nil {
		return fmt.Errorf("the agent at %s: answer to %s: %w", c.socket, path, err)
	}
	return nil
}

// failed explains an error without an answer.
func (c *Client) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return &endpoint.Error{Code: endpoint.CodeTryAgain, Msg: fmt.Sprintf("the podweir agent at %s did not answer in time", c.socket), Details: err.Error()}
	}
	return fmt.Errorf("%w at %s: %w; is it running on this node?", ErrUnreachable, c.socket, err)
}
