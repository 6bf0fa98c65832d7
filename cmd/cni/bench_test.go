package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/cniapi"
	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
	"github.com/podweir/podweir/internal/ipam"
)

// binEnv names the folder of the plugin's binary to the tests.
const binEnv = "PODWEIR_TEST_CNI_BIN"

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

// testMain builds the plugin once, before the tests enter their namespaces.
func testMain(m *testing.M) int {
	if name := filepath.Base(os.Args[0]); name == beforePlugin || name == afterPlugin {
		runChained(name)
		return 0
	}
	if as := os.Getenv(asEnv); as != "" {
		return runAs(as) // a process that a test started, see process_test.go
	}
	if os.Getenv(binEnv) == "" {
		dir, err := os.MkdirTemp("", "podweir-cni")
		if err == nil {
			defer os.RemoveAll(dir)
			err = os.Setenv(binEnv, dir)
		}
		if err == nil {
			var out []byte
			if out, err = exec.Command("go", "build", "-o", filepath.Join(dir, "podweir-cni"), ".").CombinedOutput(); err != nil {
				err = fmt.Errorf("build the plugin: %w\n%s", err, out)
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return endpointtest.Main(m)
}

// node is an agent's endpoint manager behind a socket, and a runtime that
// calls the plugin's real binary.
type node struct {
	*endpoint.Manager
	t                  *testing.T
	bin, state, socket string
	fakes              *endpointtest.Fakes
	ipam               *ipam.Allocator
	cidrs              []string
	step               func(string)
	wrap               func(http.Handler) http.Handler
	server             *http.Server
	served             chan error
	cni                *libcni.CNIConfig
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{
		t: t, bin: os.Getenv(binEnv), state: filepath.Join(dir, "state"), socket: filepath.Join(dir, "agent.sock"),
		fakes: &endpointtest.Fakes{}, cidrs: []string{"10.244.80.0/24", "fd00:10:244:50::/64"},
	}
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{n.bin}, filepath.Join(dir, "cache"), &invoke.DefaultExec{
		RawExec:       &invoke.RawExec{Stderr: os.Stderr},
		PluginDecoder: version.PluginDecoder{},
	})
	n.start()
	t.Cleanup(func() {
		if n.server != nil {
			n.stop()
		}
	})
	return n
}

// start runs an agent over the state on disk.
func (n *node) start() {
	n.t.Helper()
	n.listen()
	if err := n.Restore(n.t.Context()); err != nil {
		n.t.Error(err)
	}
}

// listen starts an agent that is not through with starting.
func (n *node) listen() {
	n.t.Helper()
	n.ipam = &ipam.Allocator{}
	var cidrs []netip.Prefix
	for _, c := range n.cidrs {
		cidrs = append(cidrs, netip.MustParsePrefix(c))
	}
	err := n.ipam.SetCIDRs(cidrs)
	if err != nil {
		n.t.Fatal(err)
	}
	n.Manager, err = endpoint.New(endpoint.Config{
		StateDir: n.state, IPAM: n.ipam, Datapath: n.fakes, Regenerator: n.fakes, MTU: func() int { return 1450 },
		Step: func(s string) {
			if n.step != nil {
				n.step(s)
			}
		},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	l, err := cniapi.Listen(n.socket)
	if err != nil {
		n.t.Fatal(err)
	}
	handler := cniapi.Handler(n.Manager)
	if n.wrap != nil {
		handler = n.wrap(handler)
	}
	n.server = &http.Server{Handler: handler}
	n.served = make(chan error, 1)
	go func(s *http.Server) { n.served <- s.Serve(l) }(n.server)
}

// stop ends the agent; connections break.
func (n *node) stop() {
	n.t.Helper()
	if err := n.server.Close(); err != nil {
		n.t.Error(err)
	}
	<-n.served
	n.server = nil
	if err := n.Close(); err != nil {
		n.t.Error(err)
	}
}

// config returns a network list of one plugin, with more keys than needed.
func (n *node) config(version string, more map[string]any) *libcni.NetworkConfigList {
	n.t.Helper()
	plugin := map[string]any{
		"type": "podweir-cni", "socket": n.socket, "stateDir": n.state, "timeout": "20s", "logLevel": "error",
		"capabilities": map[string]bool{"ips": true, "portMappings": true, "bandwidth": true},
	}
	maps.Copy(plugin, more)
	return n.list(version, plugin)
}

// list is a network list of these plugins.
func (n *node) list(version string, plugins ...any) *libcni.NetworkConfigList {
	n.t.Helper()
	data, err := json.Marshal(map[string]any{"cniVersion": version, "name": "podweir", "plugins": plugins})
	if err != nil {
		n.t.Fatal(err)
	}
	list, err := libcni.NetworkConfFromBytes(data)
	if err != nil {
		n.t.Fatal(err)
	}
	return list
}

// pod describes a pod's attachment in a new network namespace.
func (n *node) pod(name string, ips ...string) *libcni.RuntimeConf {
	n.t.Helper()
	rt := &libcni.RuntimeConf{
		ContainerID: "sandbox-" + name, IfName: "eth0", NetNS: endpointtest.NewNetns(n.t).Path,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", name}, {"K8S_POD_UID", "uid-" + name},
			{"K8S_POD_INFRA_CONTAINER_ID", "sandbox-" + name},
		},
	}
	if len(ips) > 0 {
		rt.CapabilityArgs = map[string]any{"ips": ips}
	}
	return rt
}

func (n *node) add(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) *types100.Result {
	n.t.Helper()
	r, err := n.cni.AddNetworkList(n.t.Context(), list, rt)
	if err != nil {
		n.t.Fatalf("ADD %s: %v", rt.ContainerID, err)
	}
	res, err := types100.NewResultFromResult(r)
	if err != nil {
		n.t.Fatal(err)
	}
	return res
}

func (n *node) del(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) {
	n.t.Helper()
	if err := n.cni.DelNetworkList(n.t.Context(), list, rt); err != nil {
		n.t.Fatalf("DEL %s: %v", rt.ContainerID, err)
	}
}

// addAll adds all pods at once. Each has an address of each family then, or the
// test has failed.
func (n *node) addAll(list *libcni.NetworkConfigList, rts []*libcni.RuntimeConf) []*types100.Result {
	n.t.Helper()
	results := make([]*types100.Result, len(rts))
	var wg sync.WaitGroup
	for i, rt := range rts {
		wg.Go(func() {
			r, err := n.cni.AddNetworkList(context.Background(), list, rt)
			if err == nil {
				results[i], err = types100.NewResultFromResult(r)
			}
			if err != nil || len(results[i].IPs) != 2 {
				n.t.Errorf("ADD %s: %v, %v", rt.ContainerID, results[i], err)
			}
		})
	}
	wg.Wait()
	return results
}

// delAll deletes all at once.
func (n *node) delAll(list *libcni.NetworkConfigList, rts []*libcni.RuntimeConf) {
	n.t.Helper()
	var wg sync.WaitGroup
	for _, rt := range rts {
		wg.Go(func() {
			if err := n.cni.DelNetworkList(context.Background(), list, rt); err != nil {
				n.t.Errorf("DEL %s: %v", rt.ContainerID, err)
			}
		})
	}
	wg.Wait()
}

// run executes the plugin as a runtime does, without libcni's help.
func (n *node) run(env map[string]string, stdin string) (stdout string, err *types.Error) {
	n.t.Helper()
	cmd := exec.Command(filepath.Join(n.bin, "podweir-cni"))
	cmd.Env = []string{"CNI_PATH=" + n.bin}
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout = &out
	runErr := cmd.Run()
	if runErr == nil {
		return out.String(), nil
	}
	var exit *exec.ExitError
	if !errors.As(runErr, &exit) {
		n.t.Fatal(runErr)
	}
	e := &types.Error{}
	if json.Unmarshal(out.Bytes(), e) != nil {
		n.t.Fatalf("the plugin failed without a JSON error: %v\n%s", runErr, out.String())
	}
	return out.String(), e
}

func (n *node) expectNothing() {
	n.t.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "pw") {
			n.t.Errorf("interface %s is left", l.Attrs().Name)
		}
	}
	for _, dir := range []string{"endpoints", "deletions", "corrupt"} {
		entries, err := os.ReadDir(filepath.Join(n.state, dir))
		if err != nil {
			n.t.Fatal(err)
		}
		for _, e := range entries {
			n.t.Errorf("%s/%s is left", dir, e.Name())
		}
	}
	if eps := n.List(); len(eps) > 0 {
		n.t.Errorf("endpoints left: %v", eps)
	}
	if attached, up := n.fakes.Held(); attached+up > 0 {
		n.t.Errorf("%d interfaces attached, %d endpoints up", attached, up)
	}
	for i := range 60 {
		for _, format := range []string{"10.244.80.%d", "fd00:10:244:50::%x"} {
			if owner, ok := n.ipam.Owner(netip.MustParseAddr(fmt.Sprintf(format, i))); ok {
				n.t.Errorf("an address is still held by %s", owner)
			}
		}
	}
}

func expectCNI(t *testing.T, err error, code uint, texts ...string) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) || e == nil || e.Code != code {
		t.Errorf("error %v (%+v), want code %d", err, e, code)
		return
	}
	for _, text := range texts {
		if !strings.Contains(e.Msg+" "+e.Details, text) {
			t.Errorf("error %q %q does not name %q", e.Msg, e.Details, text)
		}
	}
}
