package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/endpoint"
)

func TestEveryVersionOfTheSpecification(t *testing.T) {
	n := newNode(t)
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			list := n.config(version, map[string]any{"dns": map[string]any{"nameservers": []string{"10.98.0.10"}}})
			rt := n.pod("client", "10.244.80.65", "fd00:10:244:50::65/64")
			r := n.add(list, rt)
			ep := n.List()[0]
			if len(r.Interfaces) != 2 || r.Interfaces[0].Name != ep.HostIfName || r.Interfaces[0].Sandbox != "" ||
				r.Interfaces[1].Name != "eth0" || r.Interfaces[1].Sandbox != rt.NetNS || r.Interfaces[1].Mac != ep.MAC.String() {
				t.Errorf("interfaces %v", r.Interfaces)
			}
			var ips []string
			for _, ip := range r.IPs {
				if ip.Interface == nil || *ip.Interface != 1 {
					t.Errorf("the address %v is on no interface of the pod", ip)
				}
				ips = append(ips, ip.Address.String()+" via "+ip.Gateway.String())
			}
			if !slices.Equal(ips, []string{"10.244.80.65/32 via 169.254.1.1", "fd00:10:244:50::65/128 via fe80::1"}) {
				t.Errorf("addresses %v", ips)
			}
			var routes []string
			for _, r := range r.Routes {
				routes = append(routes, fmt.Sprint(r.Dst.String(), " via ", r.GW))
			}
			if !slices.Equal(routes, []string{"169.254.1.1/32 via <nil>", "0.0.0.0/0 via 169.254.1.1", "::/0 via fe80::1"}) {
				t.Errorf("routes %v", routes)
			}
			if !slices.Equal(r.DNS.Nameservers, []string{"10.98.0.10"}) {
				t.Errorf("DNS %v", r.DNS)
			}
			if ep.Namespace != "default" || ep.Pod != "client" || ep.UID != "uid-client" || ep.Network != "podweir" {
				t.Errorf("endpoint %+v", ep)
			}
			if version != "0.3.1" { // which has no CHECK
				if err := n.cni.CheckNetworkList(t.Context(), list, rt); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			}
			n.del(list, rt)
			n.del(list, rt)
			n.expectNothing()
		})
	}
	versions, err := n.cni.GetVersionInfo(t.Context(), "podweir-cni")
	if err != nil || !slices.Equal(versions.SupportedVersions(), []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}) {
		t.Errorf("VERSION: %v, %v", versions, err)
	}
}

func TestCheckFindsDamage(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	n.add(list, rt)
	link, err := netlink.LinkByName(n.List()[0].HostIfName)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetDown(link); err != nil {
		t.Fatal(err)
	}
	expectCNI(t, n.cni.CheckNetworkList(t.Context(), list, rt), uint(endpoint.CodeDiffers), "is down", "default/web")
	n.del(list, rt)
	n.expectNothing()
}

// Every runtime's way of writing port mappings, and what is none.
func TestPortMappings(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	type m = map[string]any
	rt.CapabilityArgs = m{"portMappings": []m{
		{"hostPort": 80, "containerPort": 8080},
		{"hostPort": 53, "containerPort": 5353, "protocol": "udp", "hostIP": ""},
		{"hostPort": 53, "containerPort": 5354, "protocol": "TCP", "hostIP": "0.0.0.0"},
		{"hostPort": 65535, "containerPort": 1, "protocol": "Sctp", "hostIP": "::"},
		{"hostPort": 81, "containerPort": 8080, "hostIP": "::ffff:192.0.2.1"},
	}}
	n.add(list, rt)
	want := "[0.0.0.0:53->5354/tcp 53->5353/udp 80->8080/tcp 192.0.2.1:81->8080/tcp [::]:65535->1/sctp]"
	if got := fmt.Sprint(n.List()[0].PortMappings); got != want {
		t.Errorf("port mappings %s, want %s", got, want)
	}
	if err := n.cni.CheckNetworkList(t.Context(), list, rt); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	rt.CapabilityArgs = m{"portMappings": []m{{"hostPort": 80, "containerPort": 8081}}}
	expectCNI(t, n.cni.CheckNetworkList(t.Context(), list, rt), uint(endpoint.CodeDiffers), "80->8081/tcp", "80->8080/tcp")

	rival := n.pod("rival")
	rival.CapabilityArgs = rt.CapabilityArgs
	_, err := n.cni.AddNetworkList(t.Context(), list, rival)
	expectCNI(t, err, uint(endpoint.CodeHostPort), "host port 80/tcp", "default/web")
	n.stop()
	n.start() // what is on disk counts as well
	_, err = n.cni.AddNetworkList(t.Context(), list, rival)
	expectCNI(t, err, uint(endpoint.CodeHostPort), "default/web")
	n.del(list, rt)
	n.add(list, rival)
	n.del(list, rival)

	for name, c := range map[string]struct {
		mapping m
		text    string
	}{
		"no host port":    {m{"containerPort": 80}, "[0].hostPort: 0"},
		"large host port": {m{"hostPort": 65536, "containerPort": 80}, "[0].hostPort: 65536"},
		"negative":        {m{"hostPort": -1, "containerPort": 80}, "[0].hostPort: -1"},
		"no port":         {m{"hostPort": 80}, "[0].containerPort: 0"},
		"large port":      {m{"hostPort": 80, "containerPort": 70000}, "[0].containerPort: 70000"},
		"protocol":        {m{"hostPort": 80, "containerPort": 80, "protocol": "icmp"}, `[0].protocol: "icmp"`},
		"multicast":       {m{"hostPort": 80, "containerPort": 80, "hostIP": "ff02::1"}, `[0].hostIP: "ff02::1"`},
		"mapped":          {m{"hostPort": 80, "containerPort": 80, "hostIP": "::ffff:224.0.0.1"}, `[0].hostIP: "::ffff:224.0.0.1"`},
		"a zone":          {m{"hostPort": 80, "containerPort": 80, "hostIP": "fe80::1%eth0"}, `[0].hostIP: "fe80::1%eth0"`},
		"a name":          {m{"hostPort": 80, "containerPort": 80, "hostIP": "node-a"}, `[0].hostIP: "node-a"`},
	} {
		t.Run(name, func(t *testing.T) {
			bad := n.pod("bad")
			bad.CapabilityArgs = m{"portMappings": []m{c.mapping}}
			_, err := n.cni.AddNetworkList(t.Context(), list, bad)
			expectCNI(t, err, types.ErrInvalidNetworkConfig, "runtimeConfig.portMappings"+c.text)
			n.del(list, bad)
		})
	}
	n.expectNothing()
}

func TestWantedAddresses(t *testing.T) {
	n := newNode(t)
	list := n.config("1.0.0", nil)
	first := n.pod("first", "10.244.80.66")
	n.add(list, first)
	for ip, text := range map[string]string{
		"10.244.80.66": "default/first", "10.244.158.65": "10.244.80.0/24", "10.244.80.255": "broadcast",
	} {
		_, err := n.cni.AddNetworkList(t.Context(), list, n.pod("second", ip))
		expectCNI(t, err, uint(endpoint.CodeAddress), ip, text)
	}
	_, err := n.cni.AddNetworkList(t.Context(), list, n.pod("second", "not-an-address"))
	expectCNI(t, err, types.ErrInvalidNetworkConfig, "not-an-address", "runtimeConfig.ips")

	byArgs := n.pod("by-args")
	byArgs.Args = append(byArgs.Args, [2]string{"IP", "10.244.80.90,fd00:10:244:50::90"})
	if r := n.add(list, byArgs); r.IPs[0].Address.IP.String() != "10.244.80.90" || r.IPs[1].Address.IP.String() != "fd00:10:244:50::90" {
		t.Errorf("addresses %v", r.IPs)
	}
	byConfig := n.config("1.0.0", map[string]any{"args": map[string]any{"cni": map[string]any{"ips": []string{"10.244.80.91"}}}})
	third := n.pod("third")
	if r := n.add(byConfig, third); r.IPs[0].Address.IP.String() != "10.244.80.91" {
		t.Errorf("addresses %v", r.IPs)
	}
	for _, rt := range []*libcni.RuntimeConf{first, byArgs, third} {
		n.del(list, rt)
	}
	n.expectNothing()
}

func TestDelWithoutNetnsAndForUnknownContainers(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	n.add(list, rt)
	rt.NetNS = ""
	n.del(list, rt)
	n.del(list, rt)
	n.del(list, n.pod("never-added"))
	n.expectNothing()
}

func TestSecondAddFails(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	n.add(list, rt)
	_, err := n.cni.AddNetworkList(t.Context(), list, rt)
	expectCNI(t, err, uint(endpoint.CodeExists), "eth0")
	if len(n.List()) != 1 {
		t.Errorf("endpoints: %v", n.List())
	}
	n.del(list, rt)
	n.expectNothing()
}

func TestAgentDown(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	gone, kept, late := n.pod("gone"), n.pod("kept"), n.pod("late")
	n.add(list, gone)
	n.add(list, kept)
	n.stop()
	_, err := n.cni.AddNetworkList(t.Context(), list, late)
	expectCNI(t, err, types.ErrTryAgainLater, n.socket, "running on this node")
	expectCNI(t, n.cni.GetStatusNetworkList(t.Context(), list), types.ErrPluginNotAvailable, n.socket)
	expectCNI(t, n.cni.CheckNetworkList(t.Context(), list, kept), types.ErrTryAgainLater, n.socket)
	n.del(list, gone)
	n.del(list, gone)
	n.del(list, late)
	n.start()
	if eps := n.List(); len(eps) != 1 || eps[0].Pod != "kept" {
		t.Errorf("endpoints after the queued deletions: %v", eps)
	}
	if err := n.cni.GetStatusNetworkList(t.Context(), list); err != nil {
		t.Error(err)
	}
	if err := n.cni.CheckNetworkList(t.Context(), list, kept); err != nil {
		t.Error(err)
	}
	n.add(list, late)
	n.del(list, late)
	n.del(list, kept)
	n.expectNothing()
}

func TestDelThatCannotBeQueuedFails(t *testing.T) {
	n := newNode(t)
	n.stop()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	list := n.config("1.1.0", map[string]any{"stateDir": file})
	expectCNI(t, n.cni.DelNetworkList(t.Context(), list, n.pod("web")), types.ErrIOFailure, n.socket, file)
}

func TestConcurrentAdds(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	const pods = 20
	rts := make([]*libcni.RuntimeConf, pods)
	for i := range rts {
		rts[i] = n.pod(fmt.Sprintf("pod-%d", i))
	}
	results := n.addAll(list, rts)
	if t.Failed() {
		return
	}
	seen := map[string]bool{}
	for _, r := range results {
		for _, a := range r.IPs {
			if seen[a.Address.String()] {
				t.Errorf("%s was given twice", a)
			}
			seen[a.Address.String()] = true
		}
	}
	n.delAll(list, rts)
	n.expectNothing()
}

func TestPluginKilledDuringAdd(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	ctx, kill := context.WithCancel(t.Context())
	undone := make(chan struct{})
	n.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		switch call {
		case "up":
			kill() // libcni kills the plugin when its context ends
			<-ctx.Done()
			return ctx.Err()
		case "down":
			close(undone)
		}
		return nil
	}
	if _, err := n.cni.AddNetworkList(ctx, list, rt); err == nil {
		t.Error("a killed plugin succeeded")
	}
	<-undone
	n.fakes.Hook = nil
	n.del(list, rt) // waits for the end of the undoing
	n.expectNothing()
	n.add(list, rt)
	n.del(list, rt)
	n.expectNothing()
}

func TestAgentKilledDuringDel(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	rt := n.pod("web")
	n.add(list, rt)
	var once sync.Once
	ended := make(chan struct{})
	n.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		if call == "down" {
			once.Do(func() { n.stop(); close(ended) })
			return context.Canceled // what follows does not happen
		}
		return nil
	}
	n.del(list, rt)
	<-ended
	n.fakes.Hook = nil
	n.start()
	n.expectNothing()
}

func TestGC(t *testing.T) {
	n := newNode(t)
	list := n.config("1.1.0", nil)
	stale, kept := n.pod("stale"), n.pod("kept")
	n.add(list, stale)
	n.add(list, kept)
	valid := []types.GCAttachment{{ContainerID: kept.ContainerID, IfName: "eth0"}}
	if err := n.cni.GCNetworkList(t.Context(), list, &libcni.GCArgs{ValidAttachments: valid}); err != nil {
		t.Fatal(err)
	}
	if eps := n.List(); len(eps) != 1 || eps[0].Pod != "kept" {
		t.Errorf("endpoints: %v", eps)
	}
	conf := fmt.Sprintf(`{"cniVersion":"1.1.0","name":"podweir","type":"podweir-cni","socket":%q}`, n.socket)
	_, err := n.run(map[string]string{"CNI_COMMAND": "GC"}, conf)
	if err == nil || err.Code != types.ErrInvalidNetworkConfig || len(n.List()) != 1 {
		t.Errorf("GC without a list: %v", err)
	}
	n.del(list, kept)
	n.expectNothing()
}

// What the runtime wants limited: where programs take the place of an ingress
// qdisc, a rate for what the pod sends has the endpoint leave it free.
func TestBandwidth(t *testing.T) {
	for name, c := range map[string]struct {
		bandwidth any
		clsact    bool
		over      bool
	}{
		"both, with tcx":       {mm{"ingressRate": 1000000, "ingressBurst": 80000, "egressRate": 2000000, "egressBurst": 80000}, false, false},
		"both":                 {mm{"ingressRate": 1000000, "ingressBurst": 80000, "egressRate": 2000000, "egressBurst": 80000}, true, true},
		"what it sends":        {mm{"egressRate": 2000000, "egressBurst": 80000}, true, true},
		"what it is sent":      {mm{"ingressRate": 2000000, "ingressBurst": 80000, "egressRate": 0}, true, false},
		"a key of a new burst": {mm{"egressRate": 2000000, "unshapedSubnets": []string{"10.0.0.0/8"}}, true, true},
		"nothing":              {mm{}, true, false},
		"not said":             {nil, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.fakes.Clsact = c.clsact
			rt := n.pod("web")
			if c.bandwidth != nil {
				rt.CapabilityArgs = mm{"bandwidth": c.bandwidth}
			}
			list := n.config("1.1.0", nil)
			r := n.add(list, rt)
			ep := n.List()[0]
			if got := ep.Over != ""; got != c.over {
				t.Errorf("endpoint %+v", ep)
			}
			// Others look for the veth.
			if r.Interfaces[0].Name != ep.HostIfName {
				t.Errorf("interfaces %v", r.Interfaces)
			}
			if err := n.cni.CheckNetworkList(t.Context(), list, rt); err != nil {
				t.Error(err)
			}
			n.del(list, rt)
			n.expectNothing()
		})
	}
}

func TestBadConfigurations(t *testing.T) {
	n := newNode(t)
	rt := n.pod("web")
	env := map[string]string{
		"CNI_COMMAND": "ADD", "CNI_CONTAINERID": rt.ContainerID, "CNI_NETNS": rt.NetNS, "CNI_IFNAME": "eth0",
	}
	base := `"cniVersion":"1.0.0","name":"podweir","type":"podweir-cni"`
	for name, c := range map[string]struct {
		conf, args string
		code       uint
		texts      []string
	}{
		"no JSON":            {`{`, "", types.ErrDecodingFailure, []string{"JSON"}},
		"no name":            {`{"cniVersion":"1.0.0","type":"podweir-cni"}`, "", types.ErrInvalidNetworkConfig, []string{"name"}},
		"future version":     {`{"cniVersion":"9.0.0","name":"podweir","type":"podweir-cni"}`, "", types.ErrIncompatibleCNIVersion, nil},
		"unknown key":        {`{` + base + `,"sockett":"/x"}`, "", types.ErrUnsupportedField, []string{"sockett", "/x"}},
		"ipam":               {`{` + base + `,"ipam":{"type":"host-local"}}`, "", types.ErrUnsupportedField, []string{"ipam", "host-local"}},
		"capability":         {`{` + base + `,"runtimeConfig":{"aliases":[]}}`, "", types.ErrUnsupportedField, []string{"aliases"}},
		"bandwidth":          {`{` + base + `,"runtimeConfig":{"bandwidth":7}}`, "", types.ErrInvalidNetworkConfig, []string{"bandwidth"}},
		"a negative rate":    {`{` + base + `,"runtimeConfig":{"bandwidth":{"egressRate":-1}}}`, "", types.ErrInvalidNetworkConfig, []string{"egressRate", "-1"}},
		"a rate with a unit": {`{` + base + `,"runtimeConfig":{"bandwidth":{"egressRate":"4M"}}}`, "", types.ErrInvalidNetworkConfig, []string{"egressRate"}},
		"portMappings":       {`{` + base + `,"runtimeConfig":{"portMappings":7}}`, "", types.ErrInvalidNetworkConfig, []string{"portMappings"}},
		"socket no string":   {`{` + base + `,"socket":7}`, "", types.ErrInvalidNetworkConfig, []string{"socket"}},
		"socket is relative": {`{` + base + `,"socket":"x.sock"}`, "", types.ErrInvalidNetworkConfig, []string{"socket", "x.sock"}},
		"state is relative":  {`{` + base + `,"stateDir":"x"}`, "", types.ErrInvalidNetworkConfig, []string{"stateDir"}},
		"timeout":            {`{` + base + `,"timeout":"soon"}`, "", types.ErrInvalidNetworkConfig, []string{"timeout", "soon"}},
		"logLevel":           {`{` + base + `,"logLevel":"loud"}`, "", types.ErrInvalidNetworkConfig, []string{"logLevel", "loud"}},
		"args":               {`{` + base + `}`, "K8S_POD_NAME", types.ErrInvalidEnvironmentVariables, []string{"K8S_POD_NAME"}},
		"args address":       {`{` + base + `}`, "IP=here", types.ErrInvalidEnvironmentVariables, []string{"here"}},
	} {
		t.Run(name, func(t *testing.T) {
			env["CNI_ARGS"] = c.args
			_, err := n.run(env, c.conf)
			if err == nil {
				t.Fatal("it was accepted")
			}
			expectCNI(t, err, c.code, c.texts...)
		})
	}
	n.expectNothing()
}

func TestDelWorksWithABadConfiguration(t *testing.T) {
	n := newNode(t)
	list := n.config("1.0.0", nil)
	rt := n.pod("web")
	n.add(list, rt)
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": "podweir", "type": "podweir-cni", "socket": n.socket, "stateDir": n.state,
		"timeout": "soon", "sockett": 1, "runtimeConfig": map[string]any{"ips": []string{"nonsense"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"CNI_COMMAND": "DEL", "CNI_CONTAINERID": rt.ContainerID, "CNI_IFNAME": "eth0", "CNI_ARGS": "broken"}
	if out, err := n.run(env, string(conf)); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("DEL: %v %s", err, out)
	}
	n.expectNothing()
}

func TestWithoutAPodName(t *testing.T) {
	n := newNode(t)
	list := n.config("1.0.0", nil)
	rt := n.pod("web")
	rt.Args = nil
	n.add(list, rt)
	if ep := n.List()[0]; ep.Pod != "" || ep.HostIfName != endpoint.HostIfName("", "", rt.ContainerID, "eth0") {
		t.Errorf("endpoint %+v", ep)
	}
	n.del(list, rt)
	n.expectNothing()
}
