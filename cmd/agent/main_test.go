package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/service"
)

func TestBadFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--mark 0", "one single bit"},
		{"--mark 0x3000", "one single bit"},
		{"--mark 0x4000", "kube-proxy"},
		{"--mtu 1000", "1280"},
		{"--service-cidr 10.96.0.0", "no range"},
		{"--service-cidr 10.96.1.0/12", "10.96.0.0/12"},
		{"--log-level loud", "debug, info, warn or error"},
		{"--log-format xml", "text or json"},
		{"--manifests /m --kubeconfig /k", "exclude each other"},
		{"--socket=", "--socket is empty"},
		{"--events-per-second -1", "invalid argument"},
		{"--events-per-second 2000000000", "at most 10000"},
		{"--routing-mode bird", "vxlan, ipip, cross-subnet, ipip-cross-subnet, direct"},
		{"--listen foo", "--listen \"foo\": must be ADDRESS:PORT"},
		{"--listen 127.0.0.1:http", "--listen"},
		{"--healthz-bind-address 10256", "ADDRESS:PORT"},
		{"--metrics-bind-address 127.0.0.1:99999", "--metrics-bind-address"},
		{"--pprof-bind-address 6060", "--pprof-bind-address"},
		{"--healthz-bind-address localhost:10256", "must be ADDRESS:PORT"},
		{"--service-node-port-range 30000", "30000-32767"},
		{"--service-node-port-range 0-10", "no range of ports"},
		{"--service-node-port-range 200-100", "no range of ports"},
		{"--service-node-port-range 30000-70000", "no range of ports"},
		{"--service-node-port-range 1-65000", "leaves 535 of the ports"},
		{"--nodeport-addresses 10.0.0.1", "neither a range"},
		{"--nodeport-addresses primary,10.0.0.0/8", "stands alone"},
		{"--nodeport-addresses ::ffff:10.0.0.0/104", "write it as IPv4"},
		{"--external-source hide", "keep, dsr or snat"},
		{"--maglev-table-size 250", "from 251 to 131071"},
		{"--maglev-table-size 65536", "no prime; the next one is 65537"},
		{"--maglev-table-size 131072", "from 251 to 131071"},
		{"--apiserver 172.31.0.2", "HOST:PORT"},
		{"--apiserver 172.31.0.2:6443 --manifests /m", "exclude each other"},
		{"--cni-conf /etc/podweir/a.conflist", "--cni-conf-dir must say where"},
		{"--config /nowhere", "no such file"},
		{"extra", "unknown command"},
		{"--masquerade ipv4", "--masquerade=ipv4"},
		{"--masquerade false", "--masquerade=false"},
		{"cleanup extra", "unknown command"},
		{"cleanup --log-level loud", "debug, info, warn or error"},
	} {
		cmd := command()
		cmd.SetArgs(strings.Fields(c.args))
		if err := cmd.ExecuteContext(context.Background()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v does not say %q", c.args, err, c.want)
		}
	}
}

// A file of flags: what it may have, and that the command line goes first.
func TestConfigFile(t *testing.T) {
	for _, c := range []struct{ file, args, want string }{
		{"", "", ""},
		{"# nothing\n", "", ""},
		{"mark: 0x2000\nservice-cidr: [10.96.0.0/12, fd00:10:98::/112]\nmasquerade: false\nrouting-mode: direct", "",
			"mark=8192 service-cidr=[10.96.0.0/12,fd00:10:98::/112] masquerade=false routing-mode=direct"},
		{"apiserver: 172.31.0.2:6443,172.31.0.3:6443", "", "apiserver=[172.31.0.2:6443,172.31.0.3:6443]"},
		{"routing-mode: direct\nlog-level: debug", "--routing-mode cross-subnet", "routing-mode=cross-subnet log-level=debug"},
		{"routing-mode: direct\nstate-dir: /s", "cleanup", "state-dir=/s"},
		{"routing: direct", "", "error: :1: there is no flag \"routing\""},
		{"mtu: 1500\nconfig: /x", "", "error: :2: there is no flag \"config\""},
		{"mtu:", "", "error: mtu: must be a value"},
		{"mtu: {a: 1}", "", "error: mtu: must be a value"},
		{"mtu: large", "", "error: mtu: \"large\""},
		{"mtu: 1400\nmtu: 1500", "", "error: :2: mtu stands there twice"},
		{"- mtu", "", "error: lines of FLAG: VALUE"},
		{"{", "", "error: yaml"},
	} {
		name := filepath.Join(t.TempDir(), "agent.yaml")
		if err := os.WriteFile(name, []byte(c.file), 0o600); err != nil {
			t.Fatal(err)
		}
		root := command()
		cmd, rest, err := root.Find(strings.Fields(c.args))
		if err == nil {
			err = cmd.ParseFlags(rest)
		}
		if err != nil {
			t.Fatal(err)
		}
		err = fromFile(cmd, name)
		if say, ok := strings.CutPrefix(c.want, "error: "); ok {
			if err == nil || !strings.Contains(err.Error(), say) || !strings.Contains(err.Error(), name) {
				t.Errorf("%q: error %v does not say %q", c.file, err, say)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", c.file, err)
		}
		for pair := range strings.FieldsSeq(c.want) {
			flag, want, _ := strings.Cut(pair, "=")
			if f := lookup(cmd, flag); f.Value.String() != want {
				t.Errorf("%q: %s is %s, want %s", c.file, flag, f.Value, want)
			}
		}
	}
}

// An empty path is the working directory's to whoever joins names to it:
// cleanup must not take its folders for the agent's.
func TestCleanupOfNoFolder(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, name := range []string{"endpoints", "deletions", "corrupt", "maps", "links"} {
		if err := os.Mkdir(name, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, flag := range []string{"--state-dir", "--bpffs", "--socket"} {
		cmd := command()
		args := []string{"cleanup", "--state-dir", "none", "--bpffs", "none", "--socket", "none", flag + "="}
		cmd.SetArgs(args)
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), flag+" is empty") {
			t.Errorf("%v: error %v does not say that %s is empty", args, err, flag)
		}
	}
	if left, err := os.ReadDir("."); err != nil || len(left) != 5 {
		t.Errorf("left of somebody else's folders: %v, %v", left, err)
	}
}

func TestFlagDefaults(t *testing.T) {
	f := flags{serviceCIDRs: []string{"10.96.0.0/12", " fd00:10:98::/112"}, logLevel: "info", logFormat: "json", mode: "vxlan",
		nodePorts: "30000-32767", masquerade: "true", externalSource: "keep"}
	f.Mark, f.BPFFS, f.StateDir, f.Socket = 0x1000, "bpf", "/var/lib/podweir", "/run/podweir/agent.sock"
	if err := f.complete(); err != nil {
		t.Fatal(err)
	}
	want := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10:98::/112")}
	if !slices.Equal(f.ServiceCIDRs, want) || f.NodeName == "" || f.Log == nil || f.Version == "" || !filepath.IsAbs(f.BPFFS) {
		t.Errorf("%+v", f.Config)
	}
	if f.NodePorts != (service.PortRange{Min: 30000, Max: 32767}) || f.Masquerade.Off4 || f.Masquerade.Off6 || f.Masquerade.Ports != nil || f.ExternalSNAT || f.MaglevSize != 0 ||
		f.NodePortAddrs.Primary || f.NodePortAddrs.In != nil {
		t.Errorf("%+v", f.Config)
	}
}

func TestMasqueradeFlags(t *testing.T) {
	for _, tt := range []struct {
		args string
		want string
		bad  string
	}{
		{args: "", want: "{false false [] []}"},
		{args: "--masquerade", want: "{false false [] []}"},
		{args: "--masquerade=false", want: "{true true [] []}"},
		{args: "--masquerade=0", want: "{true true [] []}"},
		{args: "--masquerade=IPv4", want: "{false true [] []}"},
		{args: "--masquerade=ipv6", want: "{true false [] []}"},
		{args: "--masquerade=5", bad: "must be true, false, ipv4 or ipv6"},
		{args: "--non-masquerade-cidrs=10.0.0.0/8,fd00::/8", want: "{false false [10.0.0.0/8 fd00::/8] []}"},
		{args: "--non-masquerade-cidrs=10.0.0.1/8", bad: "did you mean 10.0.0.0/8"},
		{args: "--non-masquerade-cidrs=0.0.0.0/0", bad: "is everything"},
		{args: "--non-masquerade-cidrs=::/0", bad: "is everything"},
		{args: "--non-masquerade-cidrs=::/8", bad: "name IPv4 ranges as such"},
		{args: "--non-masquerade-cidrs=::ffff:10.0.0.0/104", bad: "name IPv4 ranges as such"},
		{args: "--non-masquerade-cidrs=ten", bad: "is no range"},
		{args: "--source-ports=61000-65535,2000", want: "{false false [] [2000 61000-65535]}"},
		{args: "--source-ports=2000-1000", bad: "--source-ports"},
		{args: "--source-ports=1024-65535", bad: "1024-65535 overlaps the range of NodePorts 30000-32767"},
		{args: "--source-ports=1-2", bad: "1-2 has ports below 1024"},
		{args: "--source-ports=500-29999", bad: "500-29999 has ports below 1024"},
		{args: "--source-ports=2000-2254", bad: "these are 255 ports, at least 256 are needed"},
		{args: "--source-ports=2000-2255", want: "{false false [] [2000-2255]}"},
		{args: "--source-ports=31000-31999 --service-node-port-range=20000-22767", want: "{false false [] [31000-31999]}"},
		{args: "--source-ports=22767-29999 --service-node-port-range=20000-22767", bad: "overlaps the range of NodePorts 20000-22767"},
		{args: "--service-node-port-range=1-65535", bad: "leaves 0 of the ports"},
		{args: "--service-node-port-range=1-65535 --source-ports=1024-2047", want: "{false false [] [1024-2047]}"},
	} {
		var f flags
		cmd := commandOf(&f)
		err := cmd.ParseFlags(strings.Fields(tt.args))
		if err == nil {
			err = f.complete()
		}
		switch {
		case tt.bad != "" && (err == nil || !strings.Contains(err.Error(), tt.bad)):
			t.Errorf("%s: error %v, want %s", tt.args, err, tt.bad)
		case tt.bad == "" && (err != nil || fmt.Sprint(f.Masquerade) != tt.want):
			t.Errorf("%s: %v, %v", tt.args, f.Masquerade, err)
		}
	}
}

// cleanup --kube-proxy removes what is kube-proxy's and nothing of the agent's.
func TestCleanupKubeProxy(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread and its namespace end with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kube-ipvs0", "podweir.vxlan"} {
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time there is nothing
		cmd := command()
		cmd.SetArgs([]string{"cleanup", "--kube-proxy", "--log-level", "error"})
		if err := cmd.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	if slices.Contains(names, "kube-ipvs0") || !slices.Contains(names, "podweir.vxlan") {
		t.Errorf("left: %q", names)
	}
	cmd := command()
	cmd.SetArgs([]string{"cleanup", "--kube-proxy", "--cni-bin-dir", "/opt/cni/bin"})
	if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "cni-bin-dir") {
		t.Errorf("with a flag about the agent's: %v", err)
	}
}

// The generated clientset of the API brings every API group there is into the
// process: a third of the program, which the pages of all agents pay for.
func TestNoClientset(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if !slices.Contains(deps, "k8s.io/api/core/v1") {
		t.Fatal("not the packages of the agent")
	}
	for _, p := range []string{"k8s.io/client-go/kubernetes", "k8s.io/client-go/kubernetes/scheme", "k8s.io/api/apps/v1"} {
		if slices.Contains(deps, p) {
			t.Errorf("the agent contains %s", p)
		}
	}
}
