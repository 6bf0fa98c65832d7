package endpoint_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
)

func TestAddMakesAWorkingPodAndDelRemovesIt(t *testing.T) {
	b := newBench(t)
	// What new devices get here is none of what a pod's needs.
	for file, value := range map[string]string{
		"ipv4/conf/default/rp_filter": "1", "ipv4/conf/default/send_redirects": "1", "ipv4/conf/default/proxy_arp": "1",
		"ipv4/conf/default/forwarding": "0", "ipv6/conf/default/accept_ra": "1", "ipv6/conf/default/addr_gen_mode": "0",
		"ipv6/conf/default/disable_ipv6": "1",
	} {
		if err := os.WriteFile("/proc/sys/net/"+file, []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	req, ns := b.request("client", "10.244.80.65", "fd00:10:244:50::65")
	down := func(call string) {
		for _, l := range hostLinks(t) {
			if l.Attrs().Flags&net.FlagUp != 0 {
				t.Errorf("the host interface is up at %s", call)
			}
		}
		ns.Do(t, func() error {
			l, err := netlink.LinkByName("eth0")
			if err == nil && l.Attrs().Flags&net.FlagUp != 0 {
				t.Errorf("the pod's interface is up at %s", call)
			}
			return err
		})
	}
	b.fakes.Hook = func(_ context.Context, call string, _ endpoint.Endpoint) error {
		if call == "attach" || call == "up" {
			down(call)
		}
		return nil
	}
	ep := b.add(req)
	if calls := b.fakes.Calls(); !slices.Equal(calls, []string{"attach", "up"}) {
		t.Errorf("calls: %v", calls)
	}
	if fmt.Sprint(ep.Addrs) != "[10.244.80.65 fd00:10:244:50::65]" || ep.ID == 0 || ep.UID != "uid-client" {
		t.Errorf("endpoint %+v", ep)
	}
	if !regexp.MustCompile(`^pw[0-9a-f]{11}$`).MatchString(ep.HostIfName) {
		t.Errorf("host interface %q", ep.HostIfName)
	}
	if ep.MAC[0]&3 != 2 || ep.HostMAC[0]&3 != 2 || ep.MAC.String() == ep.HostMAC.String() {
		t.Errorf("MACs %s and %s", ep.MAC, ep.HostMAC)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Errorf("Check: %v", err)
	}
	ns.Do(t, func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(eth0, netlink.FAMILY_ALL)
		if len(addrs) != 2 {
			t.Errorf("the pod has addresses %v, want one of each family", addrs)
		}
		return err
	})
	for file, want := range map[string]string{
		"ipv4/conf/%s/rp_filter": "2", "ipv4/conf/%s/send_redirects": "0", "ipv4/conf/%s/proxy_arp": "0",
		"ipv4/conf/%s/forwarding": "1", "ipv6/conf/%s/accept_ra": "0", "ipv6/conf/%s/addr_gen_mode": "1",
	} {
		got, err := os.ReadFile("/proc/sys/net/" + fmt.Sprintf(file, ep.HostIfName))
		if err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("%s is %q, want %s (%v)", file, got, want, err)
		}
	}
	b.expectTraffic(ns, ep)

	b.del(req)
	if calls := b.fakes.Calls(); !slices.Equal(calls, []string{"detach", "down"}) {
		t.Errorf("calls: %v", calls)
	}
	b.expectNothing()
	b.del(req)
	b.expectNothing()
	b.add(req) // everything can be had again
	b.expectTraffic(ns, ep)
}

func TestAddRefusesWhatExists(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	ep := b.add(req)
	_, err := b.Add(t.Context(), req)
	expectCode(t, err, endpoint.CodeExists, "eth0", req.Netns)
	other, otherNs := b.request("other")
	again := req
	again.Netns = other.Netns
	_, err = b.Add(t.Context(), again)
	expectCode(t, err, endpoint.CodeExists, req.ContainerID)

	otherNs.Do(t, func() error {
		return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}})
	})
	_, err = b.Add(t.Context(), other)
	expectCode(t, err, endpoint.CodeExists, "eth0", other.Netns)
	if err := b.Check(t.Context(), req); err != nil {
		t.Errorf("the first endpoint suffered: %v", err)
	}
	if eps := b.List(); len(eps) != 1 || eps[0].ID != ep.ID {
		t.Errorf("endpoints: %v", eps)
	}
}

func TestAddRefusesBadRequests(t *testing.T) {
	b := newBench(t)
	good, _ := b.request("good")
	file := t.TempDir() + "/plain"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*endpoint.Request)
		code   endpoint.Code
		text   string
	}{
		"no id":            {func(r *endpoint.Request) { r.ContainerID = "" }, endpoint.CodeBadRequest, "container id"},
		"id is a path":     {func(r *endpoint.Request) { r.ContainerID = "../x" }, endpoint.CodeBadRequest, "../x"},
		"interface name":   {func(r *endpoint.Request) { r.IfName = "a/b" }, endpoint.CodeBadRequest, "a/b"},
		"long name":        {func(r *endpoint.Request) { r.IfName = "sixteen-letters-" }, endpoint.CodeBadRequest, "sixteen"},
		"half a pod":       {func(r *endpoint.Request) { r.Pod = "" }, endpoint.CodeBadRequest, "K8S_POD_NAME"},
		"no netns":         {func(r *endpoint.Request) { r.Netns = "" }, endpoint.CodeBadNetns, "no network namespace"},
		"netns is gone":    {func(r *endpoint.Request) { r.Netns = "/nowhere" }, endpoint.CodeBadNetns, "/nowhere"},
		"plain file":       {func(r *endpoint.Request) { r.Netns = file }, endpoint.CodeBadNetns, file},
		"other namespace":  {func(r *endpoint.Request) { r.Netns = "/proc/self/ns/mnt" }, endpoint.CodeBadNetns, "/proc/self/ns/mnt"},
		"the host's":       {func(r *endpoint.Request) { r.Netns = "/proc/self/ns/net" }, endpoint.CodeBadNetns, "host"},
		"address outside":  {func(r *endpoint.Request) { r.Addrs = []netip.Addr{netip.MustParseAddr("10.1.1.1")} }, endpoint.CodeAddress, "10.1.1.1"},
		"address reserved": {func(r *endpoint.Request) { r.Addrs = []netip.Addr{netip.MustParseAddr("10.244.80.1")} }, endpoint.CodeAddress, "gateway"},
	} {
		t.Run(name, func(t *testing.T) {
			req := good
			c.change(&req)
			_, err := b.Add(t.Context(), req)
			expectCode(t, err, c.code, c.text)
			b.expectNothing()
		})
	}
}

func TestAddressesTakenAndExhausted(t *testing.T) {
	b := newBench(t)
	first, _ := b.request("first", "10.244.80.66")
	b.add(first)
	second, _ := b.request("second", "10.244.80.66")
	_, err := b.Add(t.Context(), second)
	expectCode(t, err, endpoint.CodeAddress, "10.244.80.66", "default/first")
	b.del(first)
	b.add(second)
	b.del(second)
	if err := b.ipam.SetCIDRs([]netip.Prefix{netip.MustParsePrefix("10.244.80.0/31")}); err != nil {
		t.Fatal(err)
	}
	first.Addrs = nil
	_, err = b.Add(t.Context(), first)
	expectCode(t, err, endpoint.CodeExhausted, "10.244.80.0/31")
	expectCode(t, b.Status(), endpoint.CodeNotAvailable)
	if err := b.ipam.SetCIDRs(nil); err != nil {
		t.Fatal(err)
	}
	_, err = b.Add(t.Context(), first)
	expectCode(t, err, endpoint.CodeTryAgain, "no pod CIDR")
	b.expectNothing()
}

func TestFailuresUndoEverything(t *testing.T) {
	b := newBench(t)
	broken := errors.New("broken on purpose")
	for _, at := range []string{"attach", "up"} {
		t.Run(at, func(t *testing.T) {
			req, ns := b.request("web")
			b.fakes.Hook = func(_ context.Context, call string, _ endpoint.Endpoint) error {
				if call == at {
					return broken
				}
				return nil
			}
			_, err := b.Add(t.Context(), req)
			b.fakes.Hook = nil
			expectCode(t, err, endpoint.CodeInternal, broken.Error())
			b.expectNothing()
			ns.Do(t, func() error {
				if l, err := netlink.LinkByName("eth0"); err == nil {
					t.Errorf("%s is left in the pod", l.Attrs().Name)
				}
				return nil
			})
		})
	}
	t.Run("caller gone", func(t *testing.T) {
		req, _ := b.request("web")
		ctx, cancel := context.WithCancel(t.Context())
		b.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
			if call == "up" {
				cancel()
				<-ctx.Done()
				return ctx.Err()
			}
			return ctx.Err() // undoing must not run under the caller's context
		}
		_, err := b.Add(ctx, req)
		b.fakes.Hook = nil
		expectCode(t, err, endpoint.CodeTryAgain, "policy", "default/web")
		b.expectNothing()
	})
	t.Run("undoing fails too", func(t *testing.T) {
		req, _ := b.request("web")
		b.fakes.Hook = func(_ context.Context, call string, _ endpoint.Endpoint) error {
			if call == "up" || call == "detach" {
				return broken
			}
			return nil
		}
		_, err := b.Add(t.Context(), req)
		b.fakes.Hook = nil
		expectCode(t, err, endpoint.CodeInternal, "undoing it failed too")
		if len(b.List()) > 0 {
			t.Error("a broken endpoint is listed")
		}
		expectCode(t, b.Check(t.Context(), req), endpoint.CodeUnknownContainer)
		b.del(req)
		b.expectNothing()
	})
}

func TestDelForUnknownContainersAndWithoutNetns(t *testing.T) {
	b := newBench(t)
	b.del(endpoint.Request{ContainerID: "never-added", IfName: "eth0"})
	req, ns := b.request("web")
	b.add(req)
	b.del(endpoint.Request{ContainerID: req.ContainerID, IfName: "eth1"})
	if len(b.List()) != 1 {
		t.Fatal("deleting another interface removed the endpoint")
	}
	ns.Remove() // the kernel now removes the veth with the namespace
	b.del(endpoint.Request{ContainerID: req.ContainerID, IfName: "eth0"})
	b.expectNothing()
}

// ADD refuses names that are none; the DEL that follows has nothing to do.
func TestDelOfWhatCannotBe(t *testing.T) {
	b := newBench(t)
	for _, k := range []endpoint.Key{
		{ContainerID: strings.Repeat("x", 201), IfName: "eth0"}, {ContainerID: "../../x", IfName: "eth0"},
		{ContainerID: "c", IfName: "sixteen-letters-"}, {ContainerID: "c", IfName: "a/b"}, {ContainerID: "c", IfName: "lo"},
		{ContainerID: "c", IfName: "all"}, {ContainerID: "c", IfName: "a b"}, {ContainerID: "c", IfName: "eth\x000"},
	} {
		req, _ := b.request("web")
		req.ContainerID, req.IfName = k.ContainerID, k.IfName
		_, err := b.Add(t.Context(), req)
		expectCode(t, err, endpoint.CodeBadRequest)
		b.del(req)
	}
	for _, k := range []endpoint.Key{{IfName: "eth0"}, {ContainerID: "c"}} {
		expectCode(t, b.Del(t.Context(), endpoint.Request{ContainerID: k.ContainerID, IfName: k.IfName}), endpoint.CodeBadRequest, "empty")
	}
	b.expectNothing()
}

func TestLateDelOfAnOlderSandbox(t *testing.T) {
	b := newBench(t)
	old, _ := b.request("web", "10.244.80.70", "fd00:10:244:50::70")
	b.add(old)
	newer, ns := b.request("web", "10.244.80.70", "fd00:10:244:50::70")
	newer.ContainerID = "newer"
	ep := b.add(newer)
	b.expectTraffic(ns, ep)
	b.del(old)
	if err := b.Check(t.Context(), newer); err != nil {
		t.Errorf("a late DEL harmed the newer sandbox: %v", err)
	}
	b.expectTraffic(ns, ep)
	b.del(newer)
	b.expectNothing()
}

func TestTwoInterfacesOfOneContainer(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	second := req
	second.IfName = "net1"
	first := b.add(req)
	if err := b.Check(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if other := b.add(second); other.HostIfName == first.HostIfName || other.ID == first.ID {
		t.Errorf("%+v and %+v", first, other)
	}
	b.del(req)
	b.del(second)
	b.expectNothing()
}

func TestConcurrentAddsAndDels(t *testing.T) {
	b := newBench(t)
	const pods = 20
	reqs := make([]endpoint.Request, pods)
	for i := range reqs {
		reqs[i], _ = b.request(fmt.Sprintf("pod-%d", i))
	}
	eps := make([]endpoint.Endpoint, pods)
	var wg sync.WaitGroup
	for i, req := range reqs {
		for range 2 { // the second of each may come first or be refused
			wg.Go(func() {
				ep, err := b.Add(context.Background(), req)
				if err == nil {
					eps[i] = ep
				} else if endpoint.AsError(err).Code != endpoint.CodeExists {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	seen := map[string]string{}
	for i, ep := range eps {
		keys := []string{ep.MAC.String(), ep.HostMAC.String(), fmt.Sprint(ep.ID), ep.HostIfName}
		for _, a := range ep.Addrs {
			keys = append(keys, a.String())
		}
		if len(keys) != 6 {
			t.Fatalf("endpoint %d: %+v", i, ep)
		}
		for _, k := range keys {
			if other, ok := seen[k]; ok {
				t.Errorf("%s belongs to %s and %s", k, other, ep)
			}
			seen[k] = ep.String()
		}
		if err := b.Check(t.Context(), reqs[i]); err != nil {
			t.Error(err)
		}
	}
	for _, req := range reqs {
		for range 2 {
			wg.Go(func() {
				if err := b.Del(context.Background(), req); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	b.expectNothing()
}

func TestAddsAndDelsOfOnePodInTurmoil(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			_, err := b.Add(context.Background(), req)
			if err != nil && endpoint.AsError(err).Code != endpoint.CodeExists {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if err := b.Del(context.Background(), req); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	b.del(req)
	b.expectNothing()
}

func TestPodWhoseNamespaceHasIPv6SwitchedOff(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web")
	ns.Do(t, func() error {
		for _, scope := range []string{"all", "default", "lo"} {
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+scope+"/disable_ipv6", []byte("1"), 0o644); err != nil {
				return err
			}
		}
		return nil
	})
	ep := b.add(req)
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	b.expectTraffic(ns, ep)
	b.del(req)
	b.expectNothing()
}

func TestDelGoesOnWithoutItsClient(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	b.add(req)
	ctx, cancel := context.WithCancel(t.Context())
	b.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		if call == "detach" {
			cancel()
		}
		return ctx.Err()
	}
	err := b.Del(ctx, req)
	b.fakes.Hook = nil
	if err != nil {
		t.Error(err)
	}
	b.expectNothing()
}

func TestHostIfName(t *testing.T) {
	name := endpoint.HostIfName("default", "web", "c", "eth0")
	if name != endpoint.HostIfName("default", "web", "d", "eth0") {
		t.Error("the container id changes a named pod's interface")
	}
	for _, other := range []string{
		endpoint.HostIfName("default", "web", "c", "net1"),
		endpoint.HostIfName("kube-system", "web", "c", "eth0"),
		endpoint.HostIfName("", "", "c", "eth0"),
	} {
		if other == name {
			t.Errorf("%s is used twice", name)
		}
	}
}

var _ endpoint.Prober = (*endpointtest.Fakes)(nil)
