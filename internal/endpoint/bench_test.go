package endpoint_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
	"github.com/podweir/podweir/internal/ipam"
)

func TestMain(m *testing.M) { os.Exit(endpointtest.Main(m)) }

const mtu = 1450

// bench is a manager with fakes over a state folder of its own.
type bench struct {
	*endpoint.Manager
	t     *testing.T
	state string
	ipam  *ipam.Allocator
	fakes *endpointtest.Fakes
	log   strings.Builder
	mtu   int // that the agent says; 0 = the constant
	mtu6  int // of IPv6; 0 = that of the interface
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, state: t.TempDir(), fakes: &endpointtest.Fakes{}}
	b.open()
	if err := b.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.deleteLinks()
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// open makes a manager over the state as it is on disk.
func (b *bench) open() {
	b.t.Helper()
	b.ipam = &ipam.Allocator{}
	err := b.ipam.SetCIDRs([]netip.Prefix{
		netip.MustParsePrefix("10.244.80.0/24"), netip.MustParsePrefix("fd00:10:244:50::/64"),
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.Manager, err = endpoint.New(endpoint.Config{
		StateDir: b.state, IPAM: b.ipam, Datapath: b.fakes, Regenerator: b.fakes,
		MTU:  func() int { return cmp.Or(b.mtu, mtu) },
		MTU6: func() int { return b.mtu6 }, Log: slog.New(slog.NewTextHandler(&b.log, nil)),
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// restart does what a new agent process does; the datapath's programs and the
// maps outlive the old one.
func (b *bench) restart() error {
	b.t.Helper()
	if err := b.Close(); err != nil {
		b.t.Fatal(err)
	}
	b.open()
	return b.Restore(b.t.Context())
}

func (b *bench) add(req endpoint.Request) endpoint.Endpoint {
	b.t.Helper()
	ep, err := b.Add(b.t.Context(), req)
	if err != nil {
		b.t.Fatalf("Add(%+v): %v", req, err)
	}
	return ep
}

func (b *bench) del(req endpoint.Request) {
	b.t.Helper()
	if err := b.Del(b.t.Context(), req); err != nil {
		b.t.Fatalf("Del(%+v): %v", req, err)
	}
}

// request asks for eth0 of a pod of this name, in a namespace of its own.
func (b *bench) request(pod string, addrs ...string) (endpoint.Request, *endpointtest.Netns) {
	b.t.Helper()
	ns := endpointtest.NewNetns(b.t)
	req := endpoint.Request{
		ContainerID: "c-" + pod, IfName: "eth0", Netns: ns.Path,
		Namespace: "default", Pod: pod, UID: "uid-" + pod,
	}
	for _, a := range addrs {
		req.Addrs = append(req.Addrs, netip.MustParseAddr(a))
	}
	return req, ns
}

func hostLinks(t *testing.T) []netlink.Link {
	t.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var out []netlink.Link
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "pw") {
			out = append(out, l)
		}
	}
	return out
}

func (b *bench) deleteLinks() {
	for _, l := range hostLinks(b.t) {
		// One goes with the other.
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			b.t.Error(err)
		}
	}
}

// expectNothing fails if anything of an endpoint is left anywhere.
func (b *bench) expectNothing() {
	b.t.Helper()
	if links := hostLinks(b.t); len(links) > 0 {
		b.t.Errorf("interfaces left: %v", links[0].Attrs().Name)
	}
	if files := b.files(); len(files) > 0 {
		b.t.Errorf("files left: %v", files)
	}
	if eps := b.List(); len(eps) > 0 {
		b.t.Errorf("endpoints left: %v", eps)
	}
	if attached, up := b.fakes.Held(); attached+up > 0 {
		b.t.Errorf("%d interfaces attached, %d endpoints up", attached, up)
	}
	for i := range 100 {
		for _, format := range []string{"10.244.80.%d", "fd00:10:244:50::%x"} {
			a := netip.MustParseAddr(fmt.Sprintf(format, i))
			if owner, ok := b.ipam.Owner(a); ok {
				b.t.Errorf("address %s is still held by %s", a, owner)
			}
		}
	}
	for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteList(nil, fam)
		if err != nil {
			b.t.Fatal(err)
		}
		for _, r := range routes {
			if r.Dst != nil && (strings.HasPrefix(r.Dst.String(), "10.244.") || strings.HasPrefix(r.Dst.String(), "fd00:10:244")) {
				b.t.Errorf("route left: %v", r)
			}
		}
	}
}

// files lists what is in the state folder but for the corrupt one.
func (b *bench) files() []string {
	b.t.Helper()
	var out []string
	for _, dir := range []string{"endpoints", "deletions"} {
		entries, err := os.ReadDir(filepath.Join(b.state, dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			b.t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	return out
}

func expectCode(t *testing.T, err error, code endpoint.Code, texts ...string) {
	t.Helper()
	var e *endpoint.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("error is %v, want code %d", err, code)
		return
	}
	for _, text := range texts {
		if !strings.Contains(e.Error(), text) {
			t.Errorf("error %q does not name %q", e, text)
		}
	}
}

// nodeAddrs gives the host an address of each family, as a node has.
func nodeAddrs(t *testing.T) []string {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"172.31.0.2/32", "fd00:172:31::2/128"} {
		a, err := netlink.ParseAddr(s)
		if err != nil {
			t.Fatal(err)
		}
		if a.IP.To4() == nil {
			a.Flags = unix.IFA_F_NODAD // usable at once
		}
		if err := netlink.AddrReplace(lo, a); err != nil {
			t.Fatal(err)
		}
	}
	return []string{"172.31.0.2", "fd00:172:31::2"}
}

// expectTraffic opens TCP connections between host and pod, both ways and
// over both families.
func (b *bench) expectTraffic(ns *endpointtest.Netns, ep endpoint.Endpoint) {
	b.t.Helper()
	for i, node := range nodeAddrs(b.t) {
		pod := ep.Addrs[i].String()
		var inPod, onHost net.Listener
		ns.Do(b.t, func() (err error) {
			inPod, err = net.Listen("tcp", net.JoinHostPort(pod, "0"))
			return err
		})
		onHost, err := net.Listen("tcp", net.JoinHostPort(node, "0"))
		if err != nil {
			b.t.Fatal(err)
		}
		if err := connect(inPod, node); err != nil {
			b.t.Errorf("host to pod %s: %v", pod, err)
		}
		ns.Do(b.t, func() error {
			if err := connect(onHost, pod); err != nil {
				b.t.Errorf("pod %s to host: %v", pod, err)
			}
			return nil
		})
		_ = inPod.Close()
		_ = onHost.Close()
	}
}

// connect dials l from the network namespace of the calling thread and
// expects l to see the source given.
func connect(l net.Listener, source string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	addr := l.Addr().(*net.TCPAddr)
	fd, err := dialRaw(ctx, addr)
	if err != nil {
		return err
	}
	defer fd.Close()
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	if got := conn.RemoteAddr().(*net.TCPAddr).IP.String(); got != source {
		return fmt.Errorf("the source is %s, want %s", got, source)
	}
	return nil
}

// dialRaw dials without a second goroutine, which might run on a thread in
// another namespace.
func dialRaw(ctx context.Context, addr *net.TCPAddr) (net.Conn, error) {
	d := net.Dialer{FallbackDelay: -1}
	return d.DialContext(ctx, "tcp", addr.String())
}
