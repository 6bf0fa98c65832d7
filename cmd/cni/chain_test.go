package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/podweir/podweir/internal/endpoint"
)

// Plugins of a list with ours between them. The first gives the pod an
// interface of its own, by its word alone; the second does what the tuning
// plugin does to ours, and looks for the host's half as bandwidth does.
const (
	beforePlugin = "pw-test-before"
	afterPlugin  = "pw-test-after"
)

type chainedConfig struct {
	types.PluginConf
	MTU  int    `json:"mtu"`
	Fail string `json:"fail"` // which operation
}

func runChained(name string) {
	op := func(f func(*chainedConfig, *types100.Result, *skel.CmdArgs) (*types100.Result, error)) func(*skel.CmdArgs) error {
		return func(args *skel.CmdArgs) error {
			c := &chainedConfig{}
			if err := json.Unmarshal(args.StdinData, c); err != nil {
				return err
			}
			if c.Fail == os.Getenv("CNI_COMMAND") {
				return errors.New("broken on purpose")
			}
			var prev *types100.Result
			if c.RawPrevResult != nil {
				if err := version.ParsePrevResult(&c.PluginConf); err != nil {
					return err
				}
				var err error
				if prev, err = types100.NewResultFromResult(c.PrevResult); err != nil {
					return err
				}
			}
			r, err := f(c, prev, args)
			if err != nil || r == nil {
				return err
			}
			return types.PrintResult(r, c.CNIVersion)
		}
	}
	none := op(func(*chainedConfig, *types100.Result, *skel.CmdArgs) (*types100.Result, error) { return nil, nil })
	add, check := op(addBefore), none
	if name == afterPlugin {
		add, check = op(addAfter), op(checkAfter)
	}
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: none, Check: check, GC: none, Status: none},
		version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0"), name)
}

func addBefore(_ *chainedConfig, prev *types100.Result, args *skel.CmdArgs) (*types100.Result, error) {
	if prev != nil {
		return nil, errors.New("there is a plugin before the first")
	}
	return &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{{Name: "before0", Mac: "02:00:00:00:00:01", Sandbox: args.Netns}},
		IPs:        []*types100.IPConfig{{Interface: types100.Int(0), Address: net.IPNet{IP: net.IPv4(192, 0, 2, 7).To4(), Mask: net.CIDRMask(24, 32)}}},
		Routes:     []*types.Route{{Dst: net.IPNet{IP: net.IPv4(198, 51, 100, 0).To4(), Mask: net.CIDRMask(24, 32)}, GW: net.IPv4(192, 0, 2, 1)}},
		DNS:        types.DNS{Nameservers: []string{"192.0.2.53"}},
	}, nil
}

func addAfter(c *chainedConfig, prev *types100.Result, args *skel.CmdArgs) (*types100.Result, error) {
	if prev == nil {
		return nil, errors.New("no prevResult")
	}
	mtu, peer, err := inPod(args, c.MTU)
	if err != nil {
		return nil, err
	}
	found := false
	for _, i := range prev.Interfaces {
		switch {
		case i.Name == args.IfName && i.Sandbox == args.Netns:
			i.Mtu = mtu
		case i.Sandbox == "":
			link, err := netlink.LinkByName(i.Name)
			if err != nil {
				return nil, err
			}
			found = found || link.Attrs().Index == peer
		}
	}
	if !found {
		return nil, fmt.Errorf("the peer of %s is none of the host's interfaces %v", args.IfName, prev.Interfaces)
	}
	return prev, nil
}

func checkAfter(_ *chainedConfig, prev *types100.Result, args *skel.CmdArgs) (*types100.Result, error) {
	if prev == nil || !slices.ContainsFunc(prev.Interfaces, func(i *types100.Interface) bool { return i.Name == args.IfName }) {
		return nil, fmt.Errorf("the result of ADD is not handed on: %v", prev)
	}
	return nil, nil
}

// inPod sets the MTU of the pod's interface, unless 0, and returns that and
// the index of its peer.
func inPod(args *skel.CmdArgs, set int) (mtu, peer int, err error) {
	ns, err := netns.GetFromPath(args.Netns)
	if err != nil {
		return 0, 0, err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return 0, 0, err
	}
	defer h.Close()
	link, err := h.LinkByName(args.IfName)
	if err != nil {
		return 0, 0, err
	}
	if set != 0 {
		if err := h.LinkSetMTU(link, set); err != nil {
			return 0, 0, err
		}
		return set, link.Attrs().ParentIndex, nil
	}
	return link.Attrs().MTU, link.Attrs().ParentIndex, nil
}

// chained is a network list with other plugins around ours.
func (n *node) chained(version string, before, after map[string]any) *libcni.NetworkConfigList {
	n.t.Helper()
	ours := map[string]any{
		"type": "podweir-cni", "socket": n.socket, "stateDir": n.state, "timeout": "20s",
		"capabilities": map[string]bool{"ips": true, "portMappings": true, "bandwidth": true},
	}
	plugins := []any{ours}
	if before != nil {
		before["type"] = beforePlugin
		plugins = append([]any{before}, plugins...)
	}
	if after != nil {
		after["type"] = afterPlugin
		plugins = append(plugins, after)
	}
	return n.list(version, plugins...)
}

func TestChained(t *testing.T) {
	n := newNode(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	others := t.TempDir()
	for _, name := range []string{beforePlugin, afterPlugin} {
		if err := os.Symlink(self, filepath.Join(others, name)); err != nil {
			t.Fatal(err)
		}
	}
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{n.bin, others}, t.TempDir(), &invoke.DefaultExec{
		RawExec: &invoke.RawExec{Stderr: os.Stderr}, PluginDecoder: version.PluginDecoder{},
	})
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			n.t = t
			list := n.chained(version, mm{}, mm{})
			rt := n.pod("web", "10.244.80.65", "fd00:10:244:50::65")
			r := n.add(list, rt)
			ep := n.List()[0]
			var ifs, ips, routes []string
			for _, i := range r.Interfaces {
				ifs = append(ifs, i.Name)
			}
			for _, ip := range r.IPs {
				ips = append(ips, fmt.Sprint(ip.Address.String(), " on ", r.Interfaces[*ip.Interface].Name))
			}
			for _, route := range r.Routes {
				routes = append(routes, route.Dst.String())
			}
			if !slices.Equal(ifs, []string{"before0", ep.HostIfName, "eth0"}) {
				t.Errorf("interfaces %v", ifs)
			}
			if !slices.Equal(ips, []string{"192.0.2.7/24 on before0", "10.244.80.65/32 on eth0", "fd00:10:244:50::65/128 on eth0"}) {
				t.Errorf("addresses %v", ips)
			}
			if !slices.Equal(routes, []string{"198.51.100.0/24", "169.254.1.1/32", "0.0.0.0/0", "::/0"}) {
				t.Errorf("routes %v", routes)
			}
			if !slices.Equal(r.DNS.Nameservers, []string{"192.0.2.53"}) {
				t.Errorf("DNS %v", r.DNS)
			}
			if version != "0.3.1" {
				if err := n.cni.CheckNetworkList(t.Context(), list, rt); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			}
			n.del(list, rt)
			n.del(list, rt)
			n.expectNothing()
		})
	}
	n.t = t

	// A later plugin makes the MTU smaller, and says so where results can. Before
	// 1.0 they cannot, and any that is smaller may be another plugin's.
	for version, others := range map[string]uint{"0.4.0": 0, "1.0.0": uint(endpoint.CodeDiffers), "1.1.0": uint(endpoint.CodeDiffers)} {
		list := n.chained(version, nil, mm{"mtu": 1300})
		rt := n.pod("web")
		n.add(list, rt)
		if err := n.cni.CheckNetworkList(t.Context(), list, rt); err != nil {
			t.Errorf("%s: CHECK of a tuned pod: %v", version, err)
		}
		for mtu, code := range map[int]uint{1290: others, 1500: uint(endpoint.CodeDiffers)} {
			if _, _, err := inPod(&skel.CmdArgs{Netns: rt.NetNS, IfName: "eth0"}, mtu); err != nil {
				t.Fatal(err)
			}
			err := n.cni.CheckNetworkList(t.Context(), list, rt)
			if code != 0 {
				expectCNI(t, err, code, fmt.Sprintf("MTU %d", mtu))
			} else if err != nil {
				t.Errorf("%s: CHECK with MTU %d: %v", version, mtu, err)
			}
		}
		if version == "1.1.0" {
			if err := n.cni.GetStatusNetworkList(t.Context(), list); err != nil {
				t.Error(err)
			}
		}
		n.del(list, rt)
		n.expectNothing()
	}

	var list *libcni.NetworkConfigList
	var rt *libcni.RuntimeConf
	// A later plugin fails: the runtime deletes, all of the list.
	for _, fail := range []string{"ADD", "CHECK"} {
		list = n.chained("1.1.0", mm{}, mm{"fail": fail})
		rt = n.pod("web")
		_, err := n.cni.AddNetworkList(t.Context(), list, rt)
		if fail == "CHECK" && err == nil {
			err = n.cni.CheckNetworkList(t.Context(), list, rt)
		}
		if err == nil || !strings.Contains(err.Error(), "broken on purpose") {
			t.Errorf("%s: %v", fail, err)
		}
		if len(n.List()) != 1 {
			t.Errorf("%s: endpoints %v", fail, n.List())
		}
		n.del(list, rt)
		n.expectNothing()
	}

	// An earlier one fails: ours has nothing to delete.
	list = n.chained("1.1.0", mm{"fail": "ADD"}, mm{})
	if _, err := n.cni.AddNetworkList(t.Context(), list, rt); err == nil {
		t.Error("ADD succeeds without its first plugin")
	}
	n.del(list, rt)
	n.expectNothing()

	// CHECK names an address that is not the one of the result.
	rt = n.pod("web")
	list = n.chained("1.1.0", mm{}, nil)
	r := n.add(list, rt)
	told := func(address string, on int) error {
		data, err := json.Marshal(mm{"cniVersion": "1.1.0", "interfaces": r.Interfaces, "ips": []mm{{"address": address, "interface": on}}})
		if err != nil {
			t.Fatal(err)
		}
		_, cniErr := n.run(n.env("CHECK", rt), n.conf(mm{"prevResult": json.RawMessage(data)}))
		if cniErr != nil {
			return cniErr
		}
		return nil
	}
	expectCNI(t, told("10.244.80.200/32", 2), uint(endpoint.CodeDiffers), "10.244.80.200")
	expectCNI(t, told("10.244.80.2/32", 0), types.ErrInvalidNetworkConfig, "no addresses of eth0")
	expectCNI(t, told("10.244.80.2/32", 9), types.ErrInvalidNetworkConfig, "interface 9, there are 3")
	_, cniErr := n.run(n.env("CHECK", rt), n.conf(nil))
	expectCNI(t, cniErr, types.ErrInvalidNetworkConfig, "prevResult is missing")
	n.del(list, rt)
	n.expectNothing()
}
