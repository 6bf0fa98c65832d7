package apiserver

import (
	"context"
	"encoding/pem"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

func TestParseServers(t *testing.T) {
	for in, want := range map[string]string{
		"172.31.0.2:6443":                              "https://172.31.0.2:6443",
		"[fd00:172:31::2]:6443":                        "https://[fd00:172:31::2]:6443",
		"https://api.example":                          "https://api.example",
		"https://api.example:6443/":                    "https://api.example:6443",
		"172.31.0.2:6443, 172.31.0.3:6443":             "https://172.31.0.2:6443 https://172.31.0.3:6443",
		"172.31.0.2":                                   "error: not HOST:PORT",
		"fd00:172:31::2":                               "error: not HOST:PORT",
		"":                                             "error: not HOST:PORT",
		"https://api.example/k8s/clusters/c":           "error: no more",
		"tcp://172.31.0.2:6443":                        "error: no more",
		"https://:6443":                                "error: no more",
		"https://user:secret@api.example":              "error: no more",
		"172.31.0.2:6443,https://172.31.0.2:6443/":     "error: twice",
		"172.31.0.2:6443,172.31.0.3:6443,172.31.0.2:x": "error: invalid port",
	} {
		got, err := ParseServers(strings.Split(in, ","))
		if say, ok := strings.CutPrefix(want, "error: "); ok {
			if err == nil || !strings.Contains(err.Error(), say) {
				t.Errorf("%q: error %v does not say %q", in, err, say)
			}
			continue
		}
		var have []string
		for _, u := range got {
			have = append(have, u.String())
		}
		if strings.Join(have, " ") != want || err != nil {
			t.Errorf("%q: %v, %v; want %s", in, have, err, want)
		}
	}
}

// server answers every request with its name, or with a status.
type server struct {
	*httptest.Server
	status atomic.Int64
	asked  atomic.Int64
	token  atomic.Pointer[string] // the only one it takes; nil = any
}

func newServer(t *testing.T) *server {
	s := new(server)
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.asked.Add(1)
		if want := s.token.Load(); want != nil && r.Header.Get("Authorization") != "Bearer "+*want {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if st := s.status.Load(); st != 0 {
			w.WriteHeader(int(st))
		}
	}))
	t.Cleanup(s.Close)
	return s
}

// accountOf writes the files of a service account that trusts the servers,
// all of which have the same certificate.
func accountOf(t *testing.T, s *server, token string) string {
	dir := t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "ca.crt"), ca, 0o600), os.WriteFile(filepath.Join(dir, "token"), []byte(token), 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// clientOf makes a client of servers, which it tries in this order.
func clientOf(t *testing.T, account string, servers ...string) *rest.RESTClient {
	t.Helper()
	urls, err := ParseServers(servers)
	if err != nil {
		t.Fatal(err)
	}
	rc, location, err := Config(Options{Servers: urls, AccountDir: account})
	if err != nil {
		t.Fatal(err)
	}
	if location != strings.Join(servers, ",") {
		t.Errorf("location %s", location)
	}
	wrap := rc.WrapTransport
	rc.WrapTransport = func(rt http.RoundTripper) http.RoundTripper {
		trip := wrap(rt).(*failoverTrip)
		trip.current.Store(0) // not a random one
		return trip
	}
	return restClient(t, rc)
}

func restClient(t *testing.T, rc *rest.Config) *rest.RESTClient {
	t.Helper()
	rc.GroupVersion, rc.APIPath = &schema.GroupVersion{Version: "v1"}, "/api"
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, *rc.GroupVersion)
	rc.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c, err := rest.RESTClientFor(rc)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func get(t *testing.T, c *rest.RESTClient) (status int, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	err = c.Get().AbsPath("/readyz").MaxRetries(0).Do(ctx).StatusCode(&status).Error()
	return status, err
}

// closedAddr is an address on which nobody listens.
func closedAddr(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// A server that is not there costs no request.
func TestFailoverRefused(t *testing.T) {
	s := newServer(t)
	c := clientOf(t, accountOf(t, s, "x"), "https://"+closedAddr(t), "https://"+closedAddr(t), s.URL)
	for range 3 {
		if status, err := get(t, c); status != 200 || err != nil {
			t.Fatalf("status %d, %v", status, err)
		}
	}
	if s.asked.Load() != 3 {
		t.Errorf("asked %d times", s.asked.Load())
	}
}

// One that goes away while connections to it are open costs none either.
func TestFailoverGone(t *testing.T) {
	one, two := newServer(t), newServer(t)
	c := clientOf(t, accountOf(t, one, "x"), one.URL, two.URL)
	if status, err := get(t, c); status != 200 || err != nil || one.asked.Load() != 1 {
		t.Fatalf("status %d, %v, asked %d times", status, err, one.asked.Load())
	}
	one.CloseClientConnections()
	one.Close()
	if status, err := get(t, c); status != 200 || err != nil || two.asked.Load() != 1 {
		t.Fatalf("status %d, %v, asked %d times", status, err, two.asked.Load())
	}
}

// One in trouble is left after its answer, one that only refuses is not.
func TestFailoverInTrouble(t *testing.T) {
	for status, leaves := range map[int]bool{500: true, 502: true, 503: true, 504: true, 401: false, 403: false, 404: false, 410: false, 429: false} {
		one, two := newServer(t), newServer(t)
		one.status.Store(int64(status))
		c := clientOf(t, accountOf(t, one, "x"), one.URL, two.URL)
		if got, _ := get(t, c); got != status {
			t.Errorf("status %d, want %d", got, status)
		}
		_, _ = get(t, c)
		if left := two.asked.Load() > 0; left != leaves {
			t.Errorf("%d: goes on to the next server: %v, want %v", status, left, leaves)
		}
	}
}

// With none there the error names all of them, once each.
func TestFailoverNobody(t *testing.T) {
	s := newServer(t)
	addrs := []string{"https://" + closedAddr(t), "https://" + closedAddr(t)}
	_, err := get(t, clientOf(t, accountOf(t, s, "x"), addrs...))
	for _, a := range addrs {
		if err == nil || strings.Count(err.Error(), a+": ") != 1 {
			t.Errorf("error does not name %s once: %v", a, err)
		}
	}
}

// A server whose certificate is another cluster's is not talked to.
func TestFailoverVerifiesEach(t *testing.T) {
	s := newServer(t)
	// The certificate of httptest is for 127.0.0.1, not for 127.0.0.2.
	wrong := strings.Replace(s.URL, "127.0.0.1", "127.0.0.2", 1)
	l, err := net.Listen("tcp", strings.TrimPrefix(wrong, "https://"))
	if err != nil {
		t.Skipf("no further address of the loopback here: %v", err)
	}
	defer l.Close()
	other := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.NotFoundHandler()}, TLS: s.TLS.Clone()}
	other.StartTLS()
	defer other.Close()
	if status, err := get(t, clientOf(t, accountOf(t, s, "x"), wrong, s.URL)); status != 200 || err != nil {
		t.Errorf("status %d, %v", status, err)
	}
	if _, err := get(t, clientOf(t, accountOf(t, s, "x"), wrong)); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("error %v does not speak of the certificate", err)
	}
}

// The token goes with requests as the file has it, which client-go reads again
// every minute: it must know the file.
func TestTokenOfAccount(t *testing.T) {
	s := newServer(t)
	token := "of-the-account"
	s.token.Store(&token)
	dir := accountOf(t, s, token)
	if status, err := get(t, clientOf(t, dir, s.URL)); status != 200 {
		t.Errorf("status %d, %v", status, err)
	}
}

func TestWithoutAccount(t *testing.T) {
	urls := []*url.URL{{Scheme: "https", Host: "172.31.0.2:6443"}}
	if _, _, err := Config(Options{Servers: urls, AccountDir: t.TempDir()}); !errors.Is(err, ErrNone) {
		t.Errorf("error %v", err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, _, err := Config(Options{}); !errors.Is(err, ErrNone) {
		t.Errorf("error %v", err)
	}
}

// A kubeconfig that cannot be used is named, with the flag that gave it.
func TestKubeconfigIsNamed(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"empty": "", "broken": "clusters: {", "other": "clusters: []\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"missing", "empty", "broken", "other"} {
		file := filepath.Join(dir, name)
		if _, _, err := Config(Options{Kubeconfig: file}); err == nil || !strings.Contains(err.Error(), "--kubeconfig "+file+": ") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	_, _, err := Config(Options{Kubeconfig: filepath.Join(dir, "missing")})
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: error %v", err)
	}
}

// Credentials of a kubeconfig go with a list of servers, too.
func TestKubeconfigWithServers(t *testing.T) {
	s := newServer(t)
	token := "of-the-file"
	s.token.Store(&token)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	ca := filepath.Join(accountOf(t, s, ""), "ca.crt")
	err := os.WriteFile(file, []byte(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: "https://`+closedAddr(t)+`", certificate-authority: `+ca+`}}],
users: [{name: u, user: {token: `+token+`}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	rc, _, err := Config(Options{Kubeconfig: file, Servers: []*url.URL{u}})
	if err != nil {
		t.Fatal(err)
	}
	hc, err := rest.HTTPClientFor(rc)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := hc.Get(rc.Host + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("status %d", resp.StatusCode)
	}
}

// Without servers the pod's environment has the address, and whoever sets it
// there decides: the account stays the pod's.
func TestInCluster(t *testing.T) {
	s := newServer(t)
	token := "of-the-account"
	s.token.Store(&token)
	host, port, err := net.SplitHostPort(strings.TrimPrefix(s.URL, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	dir := accountOf(t, s, token)
	for _, c := range []struct{ host, port, dir, want string }{
		{host, port, dir, s.URL},
		{"fd00:10:98::1", "443", dir, "https://[fd00:10:98::1]:443"},
		{host, "", dir, "error: KUBERNETES_SERVICE_PORT"},
		{"", port, dir, "error: KUBERNETES_SERVICE_HOST"},
		{host, port, t.TempDir(), "error: token"},
	} {
		t.Setenv("KUBERNETES_SERVICE_HOST", c.host)
		t.Setenv("KUBERNETES_SERVICE_PORT", c.port)
		rc, location, err := Config(Options{AccountDir: c.dir})
		if say, ok := strings.CutPrefix(c.want, "error: "); ok {
			if !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), say) {
				t.Errorf("%+v: error %v", c, err)
			}
			continue
		}
		if err != nil || location != c.want || rc.Host != c.want {
			t.Errorf("%+v: %s, %v", c, location, err)
			continue
		}
		if c.want != s.URL {
			continue
		}
		if status, err := get(t, restClient(t, rc)); status != 200 || err != nil {
			t.Errorf("status %d, %v", status, err)
		}
	}
}

// A token that is rotated is read again when the old one is refused, whatever
// servers there are.
func TestTokenIsRotated(t *testing.T) {
	for _, servers := range []int{0, 1, 2} {
		s := newServer(t)
		before, after := "first", "second"
		s.token.Store(&before)
		dir := accountOf(t, s, before)
		var c *rest.RESTClient
		if servers == 0 {
			host, port, err := net.SplitHostPort(strings.TrimPrefix(s.URL, "https://"))
			if err != nil {
				t.Fatal(err)
			}
			t.Setenv("KUBERNETES_SERVICE_HOST", host)
			t.Setenv("KUBERNETES_SERVICE_PORT", port)
			rc, _, err := Config(Options{AccountDir: dir})
			if err != nil {
				t.Fatal(err)
			}
			c = restClient(t, rc)
		} else {
			c = clientOf(t, dir, append([]string{s.URL}, []string{"https://" + closedAddr(t)}[:servers-1]...)...)
		}
		if status, err := get(t, c); status != 200 {
			t.Fatalf("%d servers: status %d, %v", servers, status, err)
		}
		s.token.Store(&after)
		if err := os.WriteFile(filepath.Join(dir, "token"), []byte(after), 0o600); err != nil {
			t.Fatal(err)
		}
		if status, _ := get(t, c); status != 401 {
			t.Errorf("%d servers: status %d of a token that is refused", servers, status)
		}
		if status, err := get(t, c); status != 200 || err != nil {
			t.Errorf("%d servers: status %d, %v: the file was not read again", servers, status, err)
		}
	}
}
