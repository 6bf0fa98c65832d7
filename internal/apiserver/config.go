package apiserver

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
)

// ErrNone means that nothing says where an API server is.
var ErrNone = errors.New("this is no pod with a service account")

const (
	accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
	// dialTimeout is short: with several servers there is another one to try.
	dialTimeout = 3 * time.Second
)

// Options say how the API server is reached.
type Options struct {
	Kubeconfig string     // empty = the pod's service account
	Servers    []*url.URL // instead of the one server of the credentials; see [ParseServers]
	UserAgent  string
	AccountDir string // of the service account; empty = where pods have it
}

// Config returns the configuration of a client, and how to name the server or
// servers to people.
func Config(o Options) (rc *rest.Config, location string, err error) {
	switch {
	case o.Kubeconfig != "":
		if rc, err = clientcmd.BuildConfigFromFlags("", o.Kubeconfig); err != nil {
			err = fmt.Errorf("--kubeconfig %s: %w", o.Kubeconfig, err)
		}
	case len(o.Servers) > 0:
		rc, err = account(o.AccountDir)
	default:
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, "", fmt.Errorf("%w: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not both set", ErrNone)
		}
		if rc, err = account(o.AccountDir); err == nil {
			rc.Host = "https://" + net.JoinHostPort(host, port)
		}
	}
	if err != nil {
		return nil, "", err
	}
	rc.UserAgent = o.UserAgent
	if len(o.Servers) == 0 {
		return rc, rc.Host, nil
	}
	f := &failover{servers: o.Servers}
	f.current.Store(int64(rand.IntN(len(o.Servers))))
	rc.Host = o.Servers[0].String()
	rc.Wrap(f.wrap)
	if len(o.Servers) > 1 {
		rc.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext
	}
	var names []string
	for _, s := range o.Servers {
		names = append(names, s.String())
	}
	return rc, strings.Join(names, ","), nil
}

// account is what [rest.InClusterConfig] makes, without the address, which the
// environment of a pod lacks when the kubelet started it too early. The token's
// file is read again every minute and, which that would not do, as soon as a
// token is refused: a cluster that changes its keys does not wait.
func account(dir string) (*rest.Config, error) {
	if dir == "" {
		dir = accountDir
	}
	token, ca := filepath.Join(dir, "token"), filepath.Join(dir, "ca.crt")
	for _, f := range []string{token, ca} {
		if _, err := os.Stat(f); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNone, err)
		}
	}
	rc := &rest.Config{}
	rc.CAFile = ca
	rc.Wrap(transport.ResettableTokenSourceWrapTransport(transport.NewCachedFileTokenSource(token)))
	return rc, nil
}

// ParseServers reads the addresses of API servers: https://HOST, https://HOST:PORT
// or HOST:PORT.
func ParseServers(list []string) ([]*url.URL, error) {
	var out []*url.URL
	for _, s := range list {
		s = strings.TrimSpace(s)
		full := s
		if !strings.Contains(s, "://") {
			if _, port, err := net.SplitHostPort(s); err != nil || port == "" {
				return nil, fmt.Errorf("%q is not HOST:PORT (IPv6: [HOST]:PORT) or https://HOST", s)
			}
			full = "https://" + s
		}
		u, err := url.Parse(full)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", s, err)
		}
		if u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
			return nil, fmt.Errorf("%q: must be https://HOST:PORT and no more", s)
		}
		u.Path = ""
		for _, o := range out {
			if *o == *u {
				return nil, fmt.Errorf("%q stands there twice", s)
			}
		}
		out = append(out, u)
	}
	return out, nil
}
