package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/podweir/podweir/internal/apiserver"
	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/source"
	"github.com/podweir/podweir/internal/table"
)

// newAPIBench is the loop over an API server's objects.
func newAPIBench(t *testing.T, s *fakeapi.Server) *agentBench {
	b := &agentBench{t: t, dp: newFakeDatapath(t), stack: newFakeStack()}
	var err error
	if b.tables, err = table.New(); err != nil {
		t.Fatal(err)
	}
	b.follow(s)
	b.start()
	return b
}

// follow runs a source until the test ends.
func (b *agentBench) follow(s *fakeapi.Server) { b.followAt(s.Config()) }

func (b *agentBench) followAt(rc *rest.Config) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	client, err := source.NewClient(rc)
	if err != nil {
		b.t.Fatal(err)
	}
	src := source.NewAPI(client, b.tables, slog.New(slog.DiscardHandler))
	go func() { ended <- src.Run(ctx) }()
	b.t.Cleanup(func() {
		cancel()
		<-ended
	})
}

func fillAPI(s *fakeapi.Server) {
	s.Put(testNode("node-a", "172.31.0.2", "10.244.80.0/24"), testNode("node-b", "172.31.0.3", "10.244.158.0/24"),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
		testPod("remote", "node-b", "10.244.158.65", nil),
		testService("web", "10.98.0.1"), testSlice("web-1", "web", "10.244.158.65", "10.244.158.66"))
}

// S29: whichever half comes first, no service is ever written without its
// endpoints.
func TestAPIHalfSeenAtStart(t *testing.T) {
	for _, late := range []string{"services", "endpointslices", "pods", "networkpolicies"} {
		t.Run(late, func(t *testing.T) {
			s := fakeapi.New(t)
			fillAPI(s)
			s.HoldLists(late)
			b := newAPIBench(t, s)
			others := "endpointslices"
			if late == others {
				others = "services"
			}
			s.Await(t, others, func(st fakeapi.Stats) bool { return st.Lists > 0 })
			b.await("a round", func() bool { return b.a.stats.rounds > 0 })
			for what, n := range map[string]func() (int, error){
				"pw_services": size(b.dp.set.Services), "pw_addrs": size(b.dp.set.Addrs),
			} {
				if got := b.count(what, n); got != 0 {
					t.Errorf("%s has %d entries while %s are unknown", what, got, late)
				}
			}
			s.ReleaseLists(late)
			b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
			if v := b.frontend("10.98.0.1"); v.Count != 2 {
				t.Errorf("frontend %+v", v)
			}
		})
	}
}

// S30, L5: what happened while the watches were cut is applied after the
// reconnect, removals included; meanwhile everything stays.
func TestAPICutWatches(t *testing.T) {
	s := fakeapi.New(t)
	fillAPI(s)
	s.Put(testService("old", "10.98.0.2"), testSlice("old-1", "old", "10.244.158.65"))
	b := newAPIBench(t, s)
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	web := b.frontend("10.98.0.1")

	s.HoldWatches()
	s.HoldLists()
	s.CutWatches()
	s.Put(testSlice("web-1", "web", "10.244.158.66"))
	s.Delete(testService("old", ""), testSlice("old-1", "old"), testPod("remote", "", "", nil))
	s.Forget() // the versions that the watches had are gone: list anew
	if v := b.frontend("10.98.0.1"); v != web {
		t.Errorf("while the server was away: %+v, was %+v", v, web)
	}
	s.ReleaseLists()
	s.ReleaseWatches()
	b.await("the removals are applied", func() bool {
		_, old := b.a.services.frontends.Actual(maps.ServiceKey{Addr: ip("10.98.0.2"), Port: 80, Proto: maps.ProtoTCP})
		_, pod := b.a.peers.addrs.Actual(ip("10.244.158.65"))
		return b.frontend("10.98.0.1").Count == 1 && !old && !pod
	})
	v := b.frontend("10.98.0.1")
	if v.Id != web.Id {
		t.Errorf("the service's id changed from %d to %d", web.Id, v.Id)
	}
	if be, _, err := b.dp.set.Backends.Get(maps.BackendKey{Set: v.Set}); err != nil || be.Addr != ip("10.244.158.66") {
		t.Errorf("backend %+v, %v", be, err)
	}
}

// Two addresses of the API server: when the one in use goes, the agent follows
// what changes through the other.
func TestAPIFailover(t *testing.T) {
	s := fakeapi.New(t)
	fillAPI(s)
	var stops []func()
	var servers []string
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		servers = append(servers, "http://"+l.Addr().String())
		stops = append(stops, s.Serve(t, l))
	}
	urls, err := apiserver.ParseServers(servers)
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}], users: [{name: u, user: {token: x}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	rc, _, err := apiserver.Config(apiserver.Options{Kubeconfig: kubeconfig, Servers: urls})
	if err != nil {
		t.Fatal(err)
	}
	b := &agentBench{t: t, dp: newFakeDatapath(t), stack: newFakeStack()}
	if b.tables, err = table.New(); err != nil {
		t.Fatal(err)
	}
	b.followAt(rc)
	b.start()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	// Whichever is in use: one goes, comes back elsewhere, the other goes.
	for i, stop := range stops {
		stop()
		name, addr := fmt.Sprintf("after-%d", i), fmt.Sprintf("10.98.1.%d", i+1)
		s.Put(testService(name, addr), testSlice(name+"-1", name, "10.244.158.65"))
		b.await(name, func() bool {
			return b.frontend(addr).Count == 1
		})
		if i == 0 {
			l, err := net.Listen("tcp", strings.TrimPrefix(servers[0], "http://"))
			if err != nil {
				t.Fatal(err)
			}
			s.Serve(t, l)
		}
	}
}
