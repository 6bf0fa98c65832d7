package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
)

func (n *node) env(command string, rt *libcni.RuntimeConf) map[string]string {
	return map[string]string{
		"CNI_COMMAND": command, "CNI_CONTAINERID": rt.ContainerID, "CNI_NETNS": rt.NetNS, "CNI_IFNAME": rt.IfName,
	}
}

func TestVersions(t *testing.T) {
	n := newNode(t)
	rt := n.pod("web")
	all := []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}
	for _, stdin := range []string{`{"cniVersion":"1.1.0"}`, `{"cniVersion":"9.9.9"}`, "", "{"} {
		out, err := n.run(map[string]string{"CNI_COMMAND": "VERSION"}, stdin)
		var v struct{ SupportedVersions []string }
		if err != nil || json.Unmarshal([]byte(out), &v) != nil || !slices.Equal(v.SupportedVersions, all) {
			t.Errorf("VERSION with %q: %s %v", stdin, out, err)
		}
	}
	for _, version := range []any{"9.0.0", "1.2.0", "0.2.0", "0.1.0", "", nil} {
		for _, op := range []string{"ADD", "DEL", "CHECK", "GC", "STATUS"} {
			conf := map[string]any{"cniVersion": version}
			_, err := n.run(n.env(op, rt), n.conf(conf))
			expectCNI(t, err, types.ErrIncompatibleCNIVersion, all...)
		}
	}
	for _, version := range []any{7, "one", "1.x.0"} {
		_, err := n.run(n.env("ADD", rt), n.conf(map[string]any{"cniVersion": version}))
		if err == nil {
			t.Errorf("version %v is accepted", version)
		}
	}
	out, err := n.run(nil, "")
	if err != nil || out != "" {
		t.Errorf("without a command: %q, %v", out, err)
	}
	_, err = n.run(n.env("FLY", rt), n.conf(nil))
	expectCNI(t, err, types.ErrInvalidEnvironmentVariables, "FLY")
	n.expectNothing()
}

// Names, arguments and documents that are odd: what is refused says why, and
// its DEL is none the worse.
func TestOddInput(t *testing.T) {
	n := newNode(t)
	for name, c := range map[string]struct {
		env  map[string]string
		conf map[string]any
		raw  string // instead of conf
		code uint   // 0: accepted
		text string
		del  uint // code of DEL
	}{
		"interface name too long": {env: m{"CNI_IFNAME": "sixteen-letters-"}, code: 4, text: "too long", del: 4},
		"interface with a slash":  {env: m{"CNI_IFNAME": "a/b"}, code: 4, text: "/", del: 4},
		"interface with a space":  {env: m{"CNI_IFNAME": "a b"}, code: 4, text: "whitespace", del: 4},
		"interface ..":            {env: m{"CNI_IFNAME": ".."}, code: 4, text: "..", del: 4},
		"no interface":            {env: m{"CNI_IFNAME": ""}, code: 4, text: "CNI_IFNAME", del: 4},
		"interface lo":            {env: m{"CNI_IFNAME": "lo"}, code: 4, text: "lo"},
		"interface all":           {env: m{"CNI_IFNAME": "all"}, code: 4, text: "all"},
		"interface %d":            {env: m{"CNI_IFNAME": "eth%d"}, code: 4, text: "%d"},
		"interface of 15":         {env: m{"CNI_IFNAME": "fifteen-letters"}},
		"interface é":             {env: m{"CNI_IFNAME": "é"}, code: 4, text: "é"},
		"no container":            {env: m{"CNI_CONTAINERID": ""}, code: 4, text: "CNI_CONTAINERID", del: 4},
		"container with a slash":  {env: m{"CNI_CONTAINERID": "../x"}, code: 4, text: "container", del: 4},
		"long container":          {env: m{"CNI_CONTAINERID": strings.Repeat("c", 201)}, code: 4, text: "201 characters"},
		"container of 200":        {env: m{"CNI_CONTAINERID": strings.Repeat("c", 200)}},
		"no netns":                {env: m{"CNI_NETNS": ""}, code: 4, text: "CNI_NETNS"},
		"netns gone":              {env: m{"CNI_NETNS": "/nowhere/at/all"}, code: 8, text: "/nowhere/at/all"},
		"netns of the host":       {env: m{"CNI_NETNS": "/proc/self/ns/net"}, code: 8, text: "host", del: 8},
		"no CNI_PATH":             {env: m{"CNI_PATH": ""}, code: 4, text: "CNI_PATH", del: 4},

		"args: empty pairs":     {env: m{"CNI_ARGS": ";;IgnoreUnknown=1;;"}},
		"args: unknown":         {env: m{"CNI_ARGS": "Whatever=x"}},
		"args: = in the value":  {env: m{"CNI_ARGS": "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b=c=d"}},
		"args: no key":          {env: m{"CNI_ARGS": "=x"}},
		"args: no value":        {env: m{"CNI_ARGS": "K8S_POD_NAME"}, code: 4, text: "K8S_POD_NAME"},
		"args: half a pod":      {env: m{"CNI_ARGS": "K8S_POD_NAME=web"}, code: 4, text: "K8S_POD_NAMESPACE"},
		"args: the other half":  {env: m{"CNI_ARGS": "K8S_POD_NAMESPACE=web"}, code: 4, text: "K8S_POD_NAME"},
		"args: twice":           {env: m{"CNI_ARGS": "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_NAME=c"}},
		"args: path as a name":  {env: m{"CNI_ARGS": "K8S_POD_NAMESPACE=..;K8S_POD_NAME=../../etc/passwd"}},
		"args: line and quote":  {env: m{"CNI_ARGS": "K8S_POD_NAMESPACE=a\nb;K8S_POD_NAME=\"$(reboot)\""}},
		"args: no UTF-8":        {env: m{"CNI_ARGS": "K8S_POD_NAMESPACE=\xff\xfe;K8S_POD_NAME=\x80"}},
		"args: large":           {env: m{"CNI_ARGS": "K8S_POD_NAMESPACE=a;K8S_POD_NAME=" + strings.Repeat("x", 120<<10)}},
		"args: empty IP":        {env: m{"CNI_ARGS": "IP="}},
		"args: IP":              {env: m{"CNI_ARGS": "IP=10.244.80.77"}},
		"args: IP with a comma": {env: m{"CNI_ARGS": "IP=10.244.80.77,"}, code: 4, text: "IP"},
		"args: IP with a zone":  {env: m{"CNI_ARGS": "IP=fe80::1%eth0"}, code: 4, text: "%eth0"},
		"args: IP of a network": {env: m{"CNI_ARGS": "IP=10.244.80.0"}, code: 100, text: "network"},
		"args: gateway's IP":    {env: m{"CNI_ARGS": "IP=10.244.80.1"}, code: 100, text: "gateway"},
		"args: IP elsewhere":    {env: m{"CNI_ARGS": "IP=0.0.0.0"}, code: 100, text: "0.0.0.0"},

		"empty document":   {raw: " ", code: 6, text: "JSON", del: 6},
		"half a document":  {raw: `{"cniVersion":"1.1.0","name":"podweir"`, code: 6, text: "JSON", del: 6},
		"an array":         {raw: `[]`, code: 6, text: "array", del: 6},
		"null":             {raw: `null`, code: 7, text: "name", del: 7},
		"two documents":    {raw: `{} {}`, code: 6, text: "after", del: 6},
		"deep":             {raw: `{"cniVersion":"1.1.0","name":"podweir","a/b":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + `}`, code: 6, text: "depth", del: 6},
		"name with a path": {conf: mm{"name": "../x"}, code: 7, text: "network name", del: 7},
		"large":            {conf: mm{"example.org/ballast": strings.Repeat("x", 8<<20)}},
		"many keys":        {conf: ballast(20000)},
		"other types":      {conf: mm{"dns": 7, "socket": n.socket}, code: 7, text: "dns"},
		"many ports":       {conf: mm{"runtimeConfig": mm{"portMappings": ports(5000)}}},
		"too many ports":   {conf: mm{"runtimeConfig": mm{"portMappings": ports(20000)}}, code: 6, text: "too large"},
		"bad prevResult":   {conf: mm{"prevResult": mm{"cniVersion": "1.1.0", "ips": 7}}, code: 7, text: "prevResult"},
		"prevResult null":  {conf: mm{"prevResult": nil}},
		"prevResult 7":     {conf: mm{"prevResult": 7}, code: 7, text: "prevResult"},
	} {
		t.Run(name, func(t *testing.T) {
			n.t = t
			rt := n.pod("odd")
			stdin := c.raw
			if stdin == "" {
				stdin = n.conf(c.conf)
			}
			env := n.env("ADD", rt)
			maps.Copy(env, c.env)
			_, err := n.run(env, stdin)
			if c.code == 0 && err != nil {
				t.Errorf("ADD: %v", err)
			} else if c.code != 0 {
				expectCNI(t, err, c.code, c.text)
			}
			if c.code == 0 && len(n.List()) != 1 {
				t.Errorf("endpoints: %v", n.List())
			}
			env["CNI_COMMAND"] = "DEL"
			for range 2 {
				_, err = n.run(env, stdin)
				if c.del == 0 && err != nil {
					t.Errorf("DEL: %v", err)
				} else if c.del != 0 {
					expectCNI(t, err, c.del)
				}
			}
			n.expectNothing()
		})
	}
	n.t = t
	// So it is without an agent, and what is not possible leaves no note.
	n.stop()
	for _, env := range []m{{"CNI_IFNAME": "lo"}, {"CNI_CONTAINERID": strings.Repeat("c", 201)}} {
		all := n.env("DEL", n.pod("odd"))
		maps.Copy(all, env)
		if _, err := n.run(all, n.conf(nil)); err != nil {
			t.Errorf("DEL without an agent: %v", err)
		}
	}
	n.start()
	n.expectNothing()
}

type (
	m  = map[string]string
	mm = map[string]any
)

func ballast(n int) mm {
	out := mm{}
	for i := range n {
		out[fmt.Sprintf("example.org/%d", i)] = i
	}
	return out
}

func ports(n int) []mm {
	var out []mm
	for i := range n {
		out = append(out, mm{"hostPort": i + 1, "containerPort": 80, "protocol": "tcp", "hostIP": "192.0.2.1"})
	}
	return out
}

func TestStatus(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	status := func() error { return n.cni.GetStatusNetworkList(t.Context(), list) }
	if err := status(); err != nil {
		t.Errorf("in order: %v", err)
	}
	n.stop()
	expectCNI(t, status(), 50, "does not answer", n.socket)
	n.listen()
	expectCNI(t, status(), 50, "starting")
	if err := n.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := status(); err != nil {
		t.Errorf("started: %v", err)
	}
	set := func(cidrs ...string) {
		n.stop()
		n.cidrs = cidrs
		n.start()
	}
	set()
	expectCNI(t, status(), 50, "no pod CIDR")
	_, err := n.cni.AddNetworkList(t.Context(), list, n.pod("early"))
	expectCNI(t, err, types.ErrTryAgainLater, "no pod CIDR")
	set("10.244.80.0/29", "fd00:10:244:50::/64")
	var pods []*libcni.RuntimeConf
	var got []string
	for i := range 5 { // eight, but for the network, the gateway and broadcast
		if err := status(); err != nil {
			t.Errorf("after %d: %v", i, err)
		}
		rt := n.pod(fmt.Sprint("pod-", i))
		got = append(got, n.add(list, rt).IPs[0].Address.IP.String())
		pods = append(pods, rt)
	}
	slices.Sort(got)
	if want := "10.244.80.2 10.244.80.3 10.244.80.4 10.244.80.5 10.244.80.6"; strings.Join(got, " ") != want {
		t.Errorf("addresses %v, want %s", got, want)
	}
	expectCNI(t, status(), 50, "10.244.80.0/29")
	late := n.pod("late")
	_, err = n.cni.AddNetworkList(t.Context(), list, late)
	expectCNI(t, err, uint(endpoint.CodeExhausted), "10.244.80.0/29", "delete pods")
	n.del(list, late)
	// A pod that is cut off makes it 51.
	n.fakes.Hook = func(_ context.Context, call string, ep endpoint.Endpoint) error {
		if call == "up" && ep.Pod == "pod-3" {
			return fmt.Errorf("broken on purpose")
		}
		return nil
	}
	n.stop()
	n.listen()
	if err := n.Restore(t.Context()); err == nil {
		t.Error("Restore is content")
	}
	n.fakes.Hook = nil
	expectCNI(t, status(), 51, "10.244.80.0/29", "default/pod-3")
	n.del(list, pods[0])
	if err := status(); err != nil {
		t.Errorf("with an address to give: %v", err)
	}
	for _, rt := range pods {
		n.del(list, rt)
	}
	n.expectNothing()
}

// What GC takes for its list of valid attachments.
func TestGCLists(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	one, two := n.pod("one"), n.pod("two")
	key := func(rt *libcni.RuntimeConf) mm { return mm{"containerID": rt.ContainerID, "ifname": rt.IfName} }
	const valid = "cni.dev/valid-attachments"
	for name, c := range map[string]struct {
		conf mm
		left int
		code uint
		text string
	}{
		"absent":       {mm{}, 2, types.ErrInvalidNetworkConfig, valid + " is missing"},
		"null":         {mm{valid: nil}, 0, 0, ""},
		"empty":        {mm{valid: []mm{}}, 0, 0, ""},
		"one":          {mm{valid: []mm{key(one)}}, 1, 0, ""},
		"both":         {mm{valid: []mm{key(one), key(two), key(one)}}, 2, 0, ""},
		"strangers":    {mm{valid: []mm{{"containerID": "x", "ifname": "eth0"}, {"containerID": one.ContainerID, "ifname": "eth1"}}}, 0, 0, ""},
		"no interface": {mm{valid: []mm{key(two), {"containerID": one.ContainerID}}}, 2, types.ErrInvalidNetworkConfig, "[1]"},
		"no container": {mm{valid: []mm{{"ifname": "eth0"}}}, 2, types.ErrInvalidNetworkConfig, "[0]"},
		"no list":      {mm{valid: key(one)}, 2, types.ErrInvalidNetworkConfig, "json"},
		"strings":      {mm{valid: []string{one.ContainerID}}, 2, types.ErrInvalidNetworkConfig, "json"},
		"other name":   {mm{"cni.dev/attachments": []mm{}}, 2, types.ErrInvalidNetworkConfig, valid + " is missing"},
		"other network": {
			mm{valid: []mm{}, "name": "another"}, 2, 0, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n.t = t
			n.add(list, one)
			n.add(list, two)
			_, err := n.run(map[string]string{"CNI_COMMAND": "GC"}, n.conf(c.conf))
			if c.code == 0 && err != nil {
				t.Errorf("GC: %v", err)
			} else if c.code != 0 {
				expectCNI(t, err, c.code, c.text)
			}
			if eps := n.List(); len(eps) != c.left {
				t.Errorf("endpoints %v, want %d", eps, c.left)
			}
			n.del(list, one)
			n.del(list, two)
			n.expectNothing()
		})
	}
	n.t = t
	// As the library does it, with what it remembers of earlier runs.
	n.add(list, one)
	n.add(list, two)
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: two.ContainerID, IfName: "eth0"}}}
	for range 2 {
		if err := n.cni.GCNetworkList(t.Context(), list, args); err != nil {
			t.Fatal(err)
		}
		if eps := n.List(); len(eps) != 1 || eps[0].Pod != "two" {
			t.Errorf("endpoints: %v", eps)
		}
	}
	if err := n.cni.GCNetworkList(t.Context(), list, &libcni.GCArgs{}); err != nil {
		t.Fatal(err)
	}
	n.expectNothing()
}

// Two hundred pods at once; each again and again, with GC all the while.
func TestHundreds(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", map[string]any{"timeout": "5m"})
	const count = 200
	rts := make([]*libcni.RuntimeConf, count)
	valid := make([]types.GCAttachment, count)
	for i := range rts {
		rts[i] = n.pod(fmt.Sprint("pod-", i))
		valid[i] = types.GCAttachment{ContainerID: rts[i].ContainerID, IfName: "eth0"}
	}
	collected := make(chan struct{})
	go func() {
		defer close(collected)
		for range 10 {
			n.gc(list, valid...)
		}
	}()
	results := n.addAll(list, rts)
	<-collected
	if t.Failed() {
		return
	}
	owner := map[netip.Addr]string{}
	for i, r := range results {
		for _, ip := range r.IPs {
			a, _ := netip.AddrFromSlice(ip.Address.IP)
			if who := owner[a.Unmap()]; who != "" {
				t.Errorf("%s was given to %s and %s", a, who, rts[i].ContainerID)
			}
			owner[a.Unmap()] = rts[i].ContainerID
		}
		if err := n.Check(t.Context(), endpoint.Request{ContainerID: rts[i].ContainerID, IfName: "eth0"}); err != nil {
			t.Error(err)
		}
	}
	n.delAll(list, rts)
	n.expectNothing()
}

// ADD and DEL of one container, and GC, all at once: whatever comes last, a
// DEL after it leaves nothing, and nothing is left half.
func TestOneContainerInTurmoil(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web", "10.244.80.65")
	for range 5 {
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				// The library's cache is not made for this: one for each.
				if _, err := n.run(n.env("ADD", rt), n.conf(mm{"runtimeConfig": mm{"ips": []string{"10.244.80.65"}}})); err != nil && err.Code != uint(endpoint.CodeExists) {
					t.Errorf("ADD: %v", err)
				}
			})
			wg.Go(func() {
				if _, err := n.run(n.env("DEL", rt), n.conf(nil)); err != nil {
					t.Errorf("DEL: %v", err)
				}
			})
			wg.Go(func() { n.gc(list) })
		}
		wg.Wait()
		for _, ep := range n.List() {
			if err := n.Check(t.Context(), endpoint.Request{ContainerID: ep.ContainerID, IfName: ep.IfName}); err != nil {
				t.Error(err)
			}
		}
		if _, err := n.run(n.env("DEL", rt), n.conf(nil)); err != nil {
			t.Fatal(err)
		}
		n.expectNothing()
	}
}

// After a reboot there are no devices, no namespaces and no /run; the folders of
// state and of the runtime's cache are there.
func TestReboot(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	var old []*libcni.RuntimeConf
	for i := range 5 {
		rt := n.pod(fmt.Sprint("pod-", i))
		n.add(list, rt)
		old = append(old, rt)
	}
	eps := n.List()
	n.stop()
	n.del(list, old[4]) // noted, the machine goes down before the agent is back
	for _, ep := range eps {
		link, err := netlink.LinkByName(ep.HostIfName)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, rt := range old {
		_ = unix.Unmount(rt.NetNS, unix.MNT_DETACH)
		if err := os.Remove(rt.NetNS); err != nil {
			t.Fatal(err)
		}
	}
	n.socket = filepath.Join(t.TempDir(), "run", "podweir", "agent.sock")
	list = n.config("1.1.0", nil)
	expectCNI(t, n.cni.GetStatusNetworkList(t.Context(), list), 50)
	n.del(list, old[3]) // before the agent
	n.takeOver()
	n.expectNothing()
	// New sandboxes of the same pods, one by one with the old ones' DEL.
	for i, rt := range old {
		fresh := n.pod(fmt.Sprint("pod-", i))
		fresh.ContainerID = fmt.Sprint("new-", i)
		n.add(list, fresh)
		n.del(list, rt)
		if err := n.cni.CheckNetworkList(t.Context(), list, fresh); err != nil {
			t.Error(err)
		}
		n.del(list, fresh)
	}
	n.expectNothing()
}

// A state folder without space: with an agent ADD fails and DEL works, without
// one DEL says what is wrong. Nothing half written remains, and with space all
// is well.
func TestFullDisk(t *testing.T) {
	n := newNode(t)
	n.stop()
	n.state = t.TempDir()
	if err := unix.Mount("tmpfs", n.state, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(n.state, unix.MNT_DETACH) })
	list := n.config("1.1.0", nil)
	n.start()
	one, two, late := n.pod("one"), n.pod("two"), n.pod("late")
	n.add(list, one)
	n.add(list, two)
	fill := filepath.Join(n.state, "fill")
	_ = os.WriteFile(fill, make([]byte, 1<<20), 0o600)
	_, err := n.cni.AddNetworkList(t.Context(), list, late)
	expectCNI(t, err, types.ErrIOFailure, "no space left", "default/late", n.state)
	n.del(list, late)
	n.del(list, one)
	_ = os.WriteFile(fill, make([]byte, 1<<20), 0o600) // what DEL set free
	n.stop()
	_, err2 := n.run(n.env("DEL", two), n.conf(nil))
	expectCNI(t, err2, types.ErrIOFailure, "no space left", n.socket, n.state)
	for _, dir := range []string{"endpoints", "deletions"} {
		entries, err := os.ReadDir(filepath.Join(n.state, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.Name() != two.ContainerID+":eth0.json" || dir != "endpoints" {
				t.Errorf("%s/%s is left", dir, e.Name())
			}
		}
	}
	n.start() // an agent starts without space
	if err := n.cni.CheckNetworkList(t.Context(), list, two); err != nil {
		t.Error(err)
	}
	n.stop()
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	n.del(list, two)
	n.start()
	n.expectNothing()
	n.add(list, late)
	n.del(list, late)
	n.expectNothing()
}

// ADD answers when policy is in force, and not before.
func TestAddWaitsForPolicy(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	asked, grant := make(chan struct{}), make(chan struct{})
	n.fakes.Hook = func(_ context.Context, call string, _ endpoint.Endpoint) error {
		if call == "up" {
			close(asked)
			<-grant
		}
		return nil
	}
	answered := make(chan error, 1)
	go func() {
		_, err := n.cni.AddNetworkList(context.Background(), list, rt)
		answered <- err
	}()
	<-asked
	select {
	case err := <-answered:
		t.Fatalf("ADD answers before policy is in force: %v", err)
	default:
	}
	if eps := n.List(); len(eps) > 0 {
		t.Errorf("endpoints that count as ready: %v", eps)
	}
	close(grant)
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	n.del(list, rt)
	n.expectNothing()
}
