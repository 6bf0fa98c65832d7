package contract

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/test/cluster"
)

// apiPort is where the API servers of these cases listen.
const apiPort = 6443

// apiWorld is a cluster whose agents read from an API server outside of it.
type apiWorld struct {
	*world
	api        *fakeapi.Server
	kubeconfig string
}

// withAPI makes a cluster with the objects of examples/basic in the API
// server. Nobody serves them yet.
func withAPI(t *testing.T) *apiWorld {
	t.Helper()
	a := &apiWorld{api: fakeapi.New(t), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	a.world = own(t, cluster.Config{Kubeconfig: a.kubeconfig})
	for _, o := range a.objs {
		a.api.Put(o)
	}
	return a
}

// through has agents that start from now on reach the API server there.
func (a *apiWorld) through(t *testing.T, addr string) {
	t.Helper()
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "http://%s"}}]
users: [{name: agent, user: {}}]
contexts: [{name: test, context: {cluster: test, user: agent}}]
current-context: test
`, addr)
	ok(t, os.WriteFile(a.kubeconfig, []byte(text), 0o600))
}

// serve has the API server answer inside a namespace, until stop.
func (a *apiWorld) serve(t *testing.T, ctx context.Context, ns *cluster.Netns) (stop func()) {
	t.Helper()
	var l net.Listener
	ok(t, ns.Do(func() (err error) {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(ctx, "tcp4", fmt.Sprintf(":%d", apiPort))
		return err
	}))
	return a.api.Serve(t, l)
}

// bringUpAPI starts agents and pods; the API server is the client outside's.
func (a *apiWorld) bringUpAPI(t *testing.T, ctx context.Context) (stop func()) {
	t.Helper()
	stop = a.serve(t, ctx, a.Ext)
	a.through(t, fmt.Sprintf("172.31.0.1:%d", apiPort))
	ok(t, a.StartAgents(ctx))
	ok(t, a.plug(ctx))
	return stop
}

// service puts a service and the slices of its two families.
func (a *apiWorld) service(name string, ips []string, pods ...*cluster.Pod) {
	a.api.Put(clusterIP(name, ips, bothPorts(80)...))
	a.endpoints(name, pods...)
}

func (a *apiWorld) endpoints(name string, pods ...*cluster.Pod) {
	for _, s := range slicesFor(name, name, bothSlicePorts(cluster.ServerPort), pods...) {
		a.api.Put(s)
	}
}

func (a *apiWorld) remove(name string) {
	a.api.Delete(clusterIP(name, []string{"10.98.0.0"}))
	for _, s := range slicesFor(name, name, nil) {
		a.api.Delete(s)
	}
}

// holds checks, without waiting, that every node has exactly these backends.
func (a *apiWorld) holds(t *testing.T, when string, ips []string, pods ...*cluster.Pod) {
	t.Helper()
	for _, n := range a.Nodes {
		for _, v6 := range []bool{false, true} {
			for _, proto := range protos() {
				target, want := vip(pick(v6, ips[0], ips[1]), 80), atAll(v6, pods...)
				slices.SortFunc(want, netip.AddrPort.Compare)
				if got, known, err := backends(n, proto, target); err != nil || !known || !slices.Equal(got, want) {
					t.Errorf("%s, %s: %s %s has %v (known: %v, %v), want %v", when, n.NodeName, proto, target, got, known, err, want)
				}
			}
		}
	}
}

// become awaits the same.
func (a *apiWorld) become(t *testing.T, ctx context.Context, ips []string, pods ...*cluster.Pod) {
	t.Helper()
	for _, v6 := range []bool{false, true} {
		for _, proto := range protos() {
			a.inForce(t, ctx, proto, vip(pick(v6, ips[0], ips[1]), 80), atAll(v6, pods...)...)
		}
	}
}

// said looks for words in what the podweir command says on the first node.
func (a *apiWorld) said(ctx context.Context, args string, words ...string) error {
	out, err := a.a.Podweir(ctx, strings.Fields(args)...)
	if err != nil {
		return fmt.Errorf("podweir %s: %w", args, err)
	}
	for _, w := range words {
		if !strings.Contains(out, w) {
			return fmt.Errorf("podweir %s does not say %q:\n%s", args, w, out)
		}
	}
	return nil
}

func (a *apiWorld) says(t *testing.T, ctx context.Context, args string, words ...string) {
	t.Helper()
	ok(t, a.said(ctx, args, words...))
}

// complains awaits that every agent reports a problem with these words.
func (a *apiWorld) complains(t *testing.T, ctx context.Context, words ...string) {
	t.Helper()
	for _, n := range a.Nodes {
		eventually(t, ctx, func() error {
			all := status(t, ctx, n).Problems
			for _, p := range all {
				if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(p.Error, w) }) {
					return nil
				}
			}
			return fmt.Errorf("%s reports no problem with %q: %+v", n.NodeName, words, all)
		})
	}
}

// The API server goes away, comes back and fails, answers halves, and is
// itself again. All the while everything that was in force stays; in the end
// everything that happened meanwhile is in force, removals included. An agent
// that is killed in between changes nothing of that.
func TestL5APIServerAway(t *testing.T) {
	a := withAPI(t)
	ctx := within(t, 240*time.Second)
	stop := a.bringUpAPI(t, ctx)
	gone, moves, anew := []string{"10.98.51.1", "fd00:10:98::3301"}, []string{"10.98.51.2", "fd00:10:98::3302"}, []string{"10.98.51.3", "fd00:10:98::3303"}
	comes, other := []string{"10.98.51.4", "fd00:10:98::3304"}, []string{"10.98.51.5", "fd00:10:98::3305"}
	web := []string{web4, web6}
	a.service("gone", gone, a.local)
	a.service("moves", moves, a.local, a.remote)
	a.service("anew", anew, a.local)
	a.become(t, ctx, gone, a.local)
	a.become(t, ctx, moves, a.local, a.remote)
	a.become(t, ctx, anew, a.local)
	c := &callers{}
	c.call(t, ctx, a.client.Netns, "tcp", vip(web4, 80), true)
	c.call(t, ctx, a.a.Netns, "udp", vip(web6, 80), true)
	unchanged := func(when string) {
		t.Helper()
		c.progress(t, ctx, 10)
		a.holds(t, when, web, a.local, a.remote)
		a.holds(t, when, gone, a.local)
		a.holds(t, when, moves, a.local, a.remote)
		a.holds(t, when, anew, a.local)
		for _, ips := range [][]string{gone, moves, anew} {
			send(t, ctx, a.client.Netns, "tcp", vip(ips[0], 80), "-count", "4", "-timeout", "30s")
		}
	}

	stop()
	a.complains(t, ctx, "endpointslices", "refused")
	// Names are the agent's, which has what it read before.
	a.says(t, ctx, "services", "default/web:", "default/moves:")
	a.says(t, ctx, "endpoints", "default/client")
	a.says(t, ctx, "flows -o wide --service default/web --from default/client", "default/client", "default/web:")
	a.says(t, ctx, "status", "http://172.31.0.1:6443, synced", "cannot", "refused", "the agent goes on trying")
	a.service("comes", comes, a.remote)
	a.remove("gone")
	a.endpoints("moves", a.remote)
	a.api.Delete(clusterIP("anew", anew))
	a.api.Put(clusterIP("anew", other, bothPorts(80)...)) // another object of that name; its slices stay
	a.api.Forget()
	unchanged("away")
	ok(t, a.a.KillAgent(ctx))
	ok(t, a.a.BeginAgent(ctx))
	unchanged("away, and an agent started anew")
	// This one has read nothing: the maps are shown with numbers, and why.
	eventually(t, ctx, func() error {
		return a.said(ctx, "status", "NOT READY", "http://172.31.0.1:6443, NOT SYNCED", "refused")
	})
	a.says(t, ctx, "services", web4)
	a.says(t, ctx, "flows --to "+web4, "10.244.80.65")

	a.api.Fail(http.StatusInternalServerError)
	stop = a.serve(t, ctx, a.Ext)
	a.complains(t, ctx, "services", "told to fail")
	unchanged("every list fails")

	a.api.HoldListsAfter(1, fakeapi.Services, fakeapi.EndpointSlices)
	before := a.api.Await(t, fakeapi.EndpointSlices, func(fakeapi.Stats) bool { return true })
	a.api.Fail(0)
	a.api.Await(t, fakeapi.EndpointSlices, func(st fakeapi.Stats) bool { return st.Begun >= before.Begun+len(a.Nodes) })
	unchanged("half of the lists has come")

	a.api.ReleaseLists()
	a.become(t, ctx, moves, a.remote)
	a.become(t, ctx, comes, a.remote)
	a.become(t, ctx, other, a.local)
	for _, v6 := range []bool{false, true} {
		for _, ips := range [][]string{gone, anew} {
			a.absent(t, ctx, "tcp", vip(pick(v6, ips[0], ips[1]), 80))
		}
		for _, ips := range [][]string{comes, moves, other} {
			send(t, ctx, a.client.Netns, "tcp", vip(pick(v6, ips[0], ips[1]), 80), "-count", "4", "-timeout", "30s")
		}
	}
	a.holds(t, "in the end", web, a.local, a.remote)
	ok(t, a.AwaitReady(ctx))
	c.stop(t, ctx)
	stop()
}

// Agents start over the maps of an earlier run while one kind of object is
// late, as a whole list or as pages: what stands is left as it is until all
// is known. A backend that went meanwhile is gone then.
func TestS29HalvesAtStart(t *testing.T) {
	a := withAPI(t)
	ctx := within(t, 240*time.Second)
	a.bringUpAPI(t, ctx)
	shrinks, web := []string{"10.98.29.1", "fd00:10:98::1d01"}, []string{web4, web6}
	a.service("shrinks", shrinks, a.local, a.remote)
	a.become(t, ctx, shrinks, a.local, a.remote)
	c := &callers{}
	c.call(t, ctx, a.client.Netns, "tcp", vip(web4, 80), true)
	c.call(t, ctx, a.client.Netns, "udp", vip(shrinks[1], 80), false)
	for _, streams := range []bool{true, false} {
		for _, late := range []string{fakeapi.Services, fakeapi.EndpointSlices} {
			when := fmt.Sprintf("%s late (streamed: %v)", late, streams)
			early := fakeapi.EndpointSlices
			if late == early {
				early = fakeapi.Services
			}
			any := func(fakeapi.Stats) bool { return true }
			ok(t, a.KillAgents(ctx))
			a.endpoints("shrinks", a.remote)
			a.api.SetWatchList(streams)
			a.api.HoldListsAfter(1, late)
			had, hadEarly := a.api.Await(t, late, any), a.api.Await(t, early, any)
			ok(t, a.BeginAgents(ctx))
			a.api.Await(t, late, func(st fakeapi.Stats) bool { return st.Begun >= had.Begun+len(a.Nodes) })
			a.api.Await(t, early, func(st fakeapi.Stats) bool { return st.Lists >= hadEarly.Lists+len(a.Nodes) })
			c.progress(t, ctx, 10)
			a.holds(t, when, web, a.local, a.remote)
			a.holds(t, when, shrinks, a.local, a.remote)
			for _, n := range a.Nodes {
				if code, body, err := n.AgentGet(ctx, "/readyz"); err != nil || code != http.StatusServiceUnavailable {
					t.Errorf("%s, %s: /readyz: %d %s, %v", when, n.NodeName, code, body, err)
				}
			}
			a.api.ReleaseLists(late)
			ok(t, a.AwaitReady(ctx))
			a.holds(t, "ready after "+when, web, a.local, a.remote)
			a.holds(t, "ready after "+when, shrinks, a.remote)
			a.endpoints("shrinks", a.local, a.remote)
			a.become(t, ctx, shrinks, a.local, a.remote)
		}
	}
	c.stop(t, ctx)
}

// Agents reach the API server by a ClusterIP that they serve themselves: they
// go on while its backends, a node and a machine outside, are replaced one by
// one, and come back after all were away.
func TestL5APIServerBehindItsService(t *testing.T) {
	a := withAPI(t)
	ctx := within(t, 240*time.Second)
	stopExt := a.bringUpAPI(t, ctx)
	const vipAPI = "10.98.0.1:443"
	ext, node := at(netip.MustParseAddr("172.31.0.1"), apiPort), at(nodeAddr(a.b, false), apiPort)
	put := func(addrs ...netip.AddrPort) {
		var ips []netip.Addr
		for _, ap := range addrs {
			ips = append(ips, ap.Addr())
		}
		a.api.Put(endpointSlice("kubernetes", "kubernetes",
			[]discoveryv1.EndpointPort{slicePort("https", corev1.ProtocolTCP, apiPort)}, ips...))
	}
	behind := func(addrs ...netip.AddrPort) {
		t.Helper()
		put(addrs...)
		a.inForce(t, ctx, "tcp", vipAPI, addrs...)
	}
	n := 0
	// works: a change reaches both nodes.
	works := func() {
		t.Helper()
		n++
		ips := []string{fmt.Sprintf("10.98.52.%d", n), fmt.Sprintf("fd00:10:98::34%02d", n)}
		a.service(fmt.Sprintf("news-%d", n), ips, a.remote)
		a.become(t, ctx, ips, a.remote)
	}
	a.api.Put(clusterIP("kubernetes", []string{"10.98.0.1"}, svcPort("https", corev1.ProtocolTCP, 443)))
	behind(ext)
	a.through(t, vipAPI)
	for _, n := range a.Nodes {
		ok(t, n.RestartAgent(ctx)) // ready: it has read all lists through the service
	}
	c := &callers{}
	c.call(t, ctx, a.client.Netns, "tcp", vip(web4, 80), true)
	works()

	// The one is replaced by the other, announced, and back.
	stopNode := a.serve(t, ctx, a.b.Netns)
	behind(ext, node)
	behind(node)
	works() // by connections that were open already
	stopExt()
	works()
	for _, n := range a.Nodes {
		ok(t, n.RestartAgent(ctx))
	}
	works()

	// One of two fails without a word: refused, agents try until they meet
	// the other.
	stopExt = a.serve(t, ctx, a.Ext)
	behind(node, ext)
	stopNode()
	works()
	behind(ext)

	// Both are away; one agent is killed in this time, too.
	stopExt()
	a.complains(t, ctx, "services", "refused")
	ok(t, a.b.KillAgent(ctx))
	ok(t, a.b.BeginAgent(ctx))
	c.progress(t, ctx, 10)
	a.serve(t, ctx, a.Ext)
	works()
	ok(t, a.AwaitReady(ctx))
	c.progress(t, ctx, 10)
	c.stop(t, ctx)
}

// inside asks an HTTP server as a client in a namespace does.
func inside(ctx context.Context, ns *cluster.Netns, url string) (code int, err error) {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		err = ns.Do(func() (err error) {
			var d net.Dialer
			d.SetMultipathTCP(false)
			c, err = d.DialContext(ctx, network, addr)
			return err
		})
		return c, err
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, errors.Join(resp.Body.Close())
}
