package kubeproxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/testns"
)

func TestMain(m *testing.M) {
	if os.Getenv("PODWEIR_TEST_SLEEPER") != "" {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test closes it
		os.Exit(0)
	}
	testns.Main(m, func() error { return loopback() })
}

func loopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// ownNamespace gives the test an empty one.
func ownNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread and its namespace end with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	if err := loopback(); err != nil {
		t.Fatal(err)
	}
}

func sh(t *testing.T, input, name string, args ...string) string {
	t.Helper()
	out, err := run(t.Context(), input, name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// kubeProxys and others' rules of a family, by table. MINE leads to chains of
// kube-proxy among others; those rules go, the rest stays.
func iptablesRules(v6, withProxy bool) string {
	a, b := "10.98.0.10/32", "10.244.1.2"
	if v6 {
		a, b = "fd00::10/128", "fd00::1:2"
	}
	lines := []string{
		"*nat",
		"P:KUBE-SERVICES", "P:KUBE-NODEPORTS", "P:KUBE-POSTROUTING", "P:KUBE-MARK-MASQ", "P:KUBE-SVC-AAAAAAAAAAAAAAAA", "P:KUBE-SEP-BBBBBBBBBBBBBBBB",
		":KUBE-KUBELET-CANARY", ":KUBE-MARK-DROP", ":KUBE-ROUTER-SERVICES", ":MINE",
		"-A PREROUTING -j MINE",
		"P-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
		"-A PREROUTING -m comment --comment \"not -j KUBE-SERVICES\" -p tcp -m tcp --dport 81 -j REDIRECT --to-ports 82",
		"P-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
		"P-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING",
		"-A POSTROUTING -m comment --comment KUBE-SERVICES -o eth9 -j MASQUERADE",
		"-A POSTROUTING -j KUBE-ROUTER-SERVICES",
		"-A MINE -s " + b + " -j RETURN",
		"P-A MINE -p udp -g KUBE-SERVICES",
		"-A MINE -j KUBE-MARK-DROP",
		"P-A KUBE-SERVICES -d " + a + " -p udp -m udp --dport 53 -j KUBE-SVC-AAAAAAAAAAAAAAAA",
		"P-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
		"P-A KUBE-SVC-AAAAAAAAAAAAAAAA -m statistic --mode random --probability 0.5 -j KUBE-SEP-BBBBBBBBBBBBBBBB",
		"P-A KUBE-SEP-BBBBBBBBBBBBBBBB -s " + b + " -j KUBE-MARK-MASQ",
		"P-A KUBE-SEP-BBBBBBBBBBBBBBBB -p udp -m udp -j DNAT --to-destination " + map[bool]string{false: b, true: "[" + b + "]"}[v6] + ":53",
		"P-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
		"COMMIT",
		"*filter",
		"P:KUBE-FORWARD", "P:KUBE-PROXY-FIREWALL", ":KUBE-FIREWALL",
		"P-A INPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL",
		"-A INPUT -j KUBE-FIREWALL",
		"P-A FORWARD -j KUBE-FORWARD",
		"-A FORWARD -i eth9 -j DROP",
		"P-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP",
		"-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP",
		"COMMIT",
		"*mangle",
		"P:KUBE-PROXY-CANARY", ":KUBE-IPTABLES-HINT",
		"-A PREROUTING -i eth9 -j MARK --set-xmark 0x1/0xffffffff",
		"COMMIT",
	}
	var out strings.Builder
	for _, l := range lines {
		if strings.HasPrefix(l, "P") {
			if !withProxy {
				continue
			}
			l = l[1:]
		}
		if strings.HasPrefix(l, ":") {
			l += " - [0:0]"
		}
		out.WriteString(l + "\n")
	}
	return out.String()
}

// saved is what a program of iptables has, but for the date and the policies'
// counters.
func saved(t *testing.T, program string) string {
	t.Helper()
	text := regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(sh(t, "", program+"-save", "-c"), "")
	return regexp.MustCompile(`(?m)^(:\S+ \S+) \[.*$`).ReplaceAllString(text, "$1")
}

var programs = map[string]bool{"iptables-legacy": false, "ip6tables-legacy": true, "iptables-nft": false, "ip6tables-nft": true}

// L4: rules of kube-proxy's in iptables of either kind are found, and removed
// from between those of others.
func TestIPTables(t *testing.T) {
	for program, v6 := range programs {
		t.Run(program, func(t *testing.T) {
			ownNamespace(t)
			sh(t, iptablesRules(v6, false), program+"-restore")
			before := saved(t, program)
			if l, err := Find(t.Context()); err != nil || l.Any() || l.Running != "" {
				t.Fatalf("found among others' rules: %+v, %v", l, err)
			}
			sh(t, iptablesRules(v6, true), program+"-restore")
			l, err := Find(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			kind := "iptables-" + program[strings.Index(program, "-")+1:]
			family := map[bool]string{false: "ip", true: "ip6"}[v6]
			want := []string{
				kind + ", table " + family + " filter, chain KUBE-FORWARD and 1 more",
				kind + ", table " + family + " mangle, chain KUBE-PROXY-CANARY",
				kind + ", table " + family + " nat, chain KUBE-SERVICES and 3 more",
			}
			if got := names(l); !slices.Equal(got, want) {
				t.Fatalf("found %q, want %q", got, want)
			}
			removed, err := Remove(t.Context())
			if err != nil || !slices.Equal(removed, want) {
				t.Fatalf("removed %q, %v; want %q", removed, err, want)
			}
			if after := saved(t, program); after != before {
				t.Errorf("before kube-proxy's rules:\n%s\nafter them:\n%s", before, after)
			}
			nothing(t)
		})
	}
}

func names(l Leftovers) (out []string) {
	for _, t := range l.Tables {
		out = append(out, t.whole())
	}
	return out
}

// nothing is left, and to remove it is no error.
func nothing(t *testing.T) {
	t.Helper()
	if l, err := Find(t.Context()); err != nil || l.Any() {
		t.Errorf("left: %+v, %v", l, err)
	}
	if removed, err := Remove(t.Context()); err != nil || len(removed) != 0 {
		t.Errorf("removed a second time: %q, %v", removed, err)
	}
}

// Many chains, which take more than one batch.
func TestManyChains(t *testing.T) {
	ownNamespace(t)
	var rules strings.Builder
	rules.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n")
	const n = 1500
	for i := range n {
		fmt.Fprintf(&rules, ":KUBE-SVC-%016d - [0:0]\n", i)
	}
	rules.WriteString("-A PREROUTING -j KUBE-SERVICES\n")
	for i := range n {
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -p tcp -m tcp --dport %d -j KUBE-SVC-%016d\n", i+1, i)
	}
	rules.WriteString("COMMIT\n")
	sh(t, rules.String(), "iptables-nft-restore")
	removed, err := Remove(t.Context())
	if want := fmt.Sprintf("iptables-nft, table ip nat, chain KUBE-SERVICES and %d more", n); err != nil || !slices.Equal(removed, []string{want}) {
		t.Fatalf("%q, %v", removed, err)
	}
	if got := saved(t, "iptables-nft"); strings.Contains(got, "KUBE") {
		t.Error(got)
	}
	nothing(t)
}

// L4: the tables of nftables mode and the device of IPVS mode.
func TestNFTables(t *testing.T) {
	ownNamespace(t)
	const others = `table inet kube-proxy { chain services { type filter hook input priority 0; accept; }; }
table ip mine { chain KUBE-SERVICES { udp dport 53 drop; }; chain in { type filter hook input priority 0; jump KUBE-SERVICES; }; }
`
	sh(t, others, "nft", "-f", "-")
	before := sh(t, "", "nft", "list", "ruleset")
	if l, err := Find(t.Context()); err != nil || l.Any() {
		t.Fatalf("found among others' rules: %+v, %v", l, err)
	}
	for _, family := range []string{"ip", "ip6"} {
		sh(t, strings.ReplaceAll(`table FAMILY kube-proxy {
	map ports { type inet_service : verdict; elements = { 80 : goto one } }
	set nodes { type inet_service; }
	chain one { udp dport @nodes drop; }
	chain pre { type nat hook prerouting priority -100; tcp dport vmap @ports; jump one; }
}`, "FAMILY", family), "nft", "-f", "-")
	}
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: Device}}); err != nil {
		t.Fatal(err)
	}
	l, err := Find(t.Context())
	want := []string{"nftables, table ip kube-proxy", "nftables, table ip6 kube-proxy"}
	if got := names(l); err != nil || !slices.Equal(got, want) || !l.Device {
		t.Fatalf("%+v, %v; want %q and the device", l, err, want)
	}
	// In the agent's image there is no program.
	t.Setenv("PATH", "")
	removed, err := Remove(t.Context())
	if want := append(want, "device kube-ipvs0"); err != nil || len(removed) != 3 || !slices.Equal(removed[:2], want[:2]) || !strings.HasPrefix(removed[2], want[2]) {
		t.Fatalf("removed %q, %v; want %q", removed, err, want)
	}
	nothing(t)
	t.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
	if after := sh(t, "", "nft", "list", "ruleset"); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// Without the programs of legacy iptables its rules stay, which is said; what
// nf_tables holds goes.
func TestNoPrograms(t *testing.T) {
	ownNamespace(t)
	for program, v6 := range programs {
		sh(t, iptablesRules(v6, true), program+"-restore")
	}
	path := os.Getenv("PATH")
	t.Setenv("PATH", t.TempDir())
	removed, err := Remove(t.Context())
	if err == nil || !strings.Contains(err.Error(), "iptables-legacy, table ip nat") || !strings.Contains(err.Error(), "kube-proxy --cleanup") {
		t.Errorf("error %v", err)
	}
	for _, r := range removed {
		if !strings.HasPrefix(r, IPTablesNFT) {
			t.Errorf("removed %s", r)
		}
	}
	l, err := Find(t.Context())
	if err != nil || len(removed) != 6 || len(l.Tables) != 6 {
		t.Errorf("removed %q, left %q, %v", removed, names(l), err)
	}
	t.Setenv("PATH", path)
	if removed, err := Remove(t.Context()); err != nil || len(removed) != 6 {
		t.Errorf("with the programs: removed %q, %v", removed, err)
	}
	nothing(t)
}

// While a kube-proxy runs, nothing is removed: it is known by its process, and
// where that cannot be seen by what it answers.
func TestRunning(t *testing.T) {
	refuses := func(t *testing.T, want string) {
		t.Helper()
		l, err := Find(t.Context())
		if err != nil || !strings.Contains(l.Running, want) || !slices.ContainsFunc(l.Troubles(), func(x Trouble) bool { return x.Object == "kube-proxy" }) {
			t.Errorf("%+v, %v; want %q", l, err, want)
		}
		if removed, err := Remove(t.Context()); err == nil || !strings.Contains(err.Error(), want) || len(removed) != 0 {
			t.Errorf("removed %q, %v", removed, err)
		}
		if l, err := Find(t.Context()); err != nil || len(l.Tables) != 1 {
			t.Errorf("it removed: %+v, %v", l, err)
		}
	}
	table := func(t *testing.T) {
		t.Helper()
		ownNamespace(t)
		sh(t, "table ip6 kube-proxy { chain services { drop; }; }", "nft", "-f", "-")
	}
	t.Run("process", func(t *testing.T) {
		table(t)
		path := filepath.Join(t.TempDir(), "kube-proxy")
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Link(self, path); err != nil {
			data, err := os.ReadFile(self)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, data, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.CommandContext(t.Context(), path)
		cmd.Env = append(os.Environ(), "PODWEIR_TEST_SLEEPER=1")
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		refuses(t, fmt.Sprintf("process %d", cmd.Process.Pid))
		// Another node's, of another namespace, is none of ours.
		elsewhere := make(chan Leftovers)
		go func() {
			defer close(elsewhere)
			runtime.LockOSThread()
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				t.Error(err)
				return
			}
			l, err := Find(context.WithoutCancel(t.Context()))
			if err != nil {
				t.Error(err)
			}
			elsewhere <- l
		}()
		if l := <-elsewhere; l.Running != "" || l.Any() {
			t.Errorf("in another namespace: %+v", l)
		}
		if err := stdin.Close(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		if removed, err := Remove(t.Context()); err != nil || len(removed) != 1 {
			t.Errorf("after its end: removed %q, %v", removed, err)
		}
	})
	for _, c := range []struct {
		addr, body string
		known      bool
	}{
		{"127.0.0.1:10249", "ipvs", true},
		{"[::]:10249", "nftables\n", true},
		{"127.0.0.2:10249", "iptables", true},
		{"127.0.0.1:10249", "", false}, // the agent's, which has no such page
		{"127.0.0.1:10249", "iptables is what I know nothing of", false},
		{"127.0.0.1:10250", "iptables", false},
	} {
		t.Run(c.addr+" "+c.body, func(t *testing.T) {
			table(t)
			l, err := net.Listen("tcp", c.addr)
			if err != nil {
				t.Fatal(err)
			}
			mux := http.NewServeMux()
			if c.body != "" {
				mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, c.body) })
			}
			s := &http.Server{Handler: mux, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
			ended := make(chan error)
			go func() { ended <- s.Serve(l) }()
			if c.known {
				refuses(t, "10249")
			} else if found, err := Find(t.Context()); err != nil || found.Running != "" {
				t.Errorf("%+v, %v", found, err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			<-ended
			if removed, err := Remove(t.Context()); err != nil || len(removed) != 1 {
				t.Errorf("after its end: removed %q, %v", removed, err)
			}
		})
	}
}

func TestProcAddr(t *testing.T) {
	for s, want := range map[string]string{
		"0100007F:2809":                         "127.0.0.1:10249",
		"00000000:2809":                         "127.0.0.1:10249",
		"00000000000000000000000000000000:2809": "[::1]:10249",
		"000000FD000000000000000001000000:0050": "[fd00::1]:80",
		"0000000000000000FFFF00000200007F:2809": "127.0.0.2:10249",
		"":                                      "",
		"0100:2809":                             "",
		"0100007F":                              "",
		"0100007F:12809":                        "",
	} {
		got, ok := procAddr(s)
		if ok != (want != "") || ok && got != netip.MustParseAddrPort(want) {
			t.Errorf("%q: %v, %v; want %q", s, got, ok, want)
		}
	}
}
