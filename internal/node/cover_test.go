package node

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The device over a pod's veth: made once, repaired, and gone with its veth.
func TestCovers(t *testing.T) {
	m := inNewNetns(t)
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const pod, name = "pw0123456789a", "pwo0123456789a"
	do(m.nl.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: pod, MTU: 1450}, PeerName: "pod0"}))
	veth := linkOf(t, m, pod)
	do(m.nl.LinkSetUp(veth))
	index := veth.Attrs().Index
	// Others have macvlans, too, by our name even.
	do(m.nl.LinkAdd(&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: linkOf(t, m, "eth0").Attrs().Index}, Mode: netlink.MACVLAN_MODE_BRIDGE}))
	foreign := linkOf(t, m, name).Attrs().Index

	c, err := m.MakeCover(index, pod)
	do(err)
	if c.Name != name || c.Veth != index || c.Index == foreign || CoverName(pod) != name || !IsCover(name) || IsHostVeth(name) || IsPodDevice(name) || IsCover("pws"+pod[2:]) || !IsPodDevice("pws"+pod[2:]) || !IsPodDevice(pod) {
		t.Fatalf("made %+v", c)
	}
	again, err := m.MakeCover(index, pod)
	do(err)
	if again != c {
		t.Errorf("made again: %+v, was %+v", again, c)
	}
	is := func(mtu int) {
		t.Helper()
		a := linkOf(t, m, name).Attrs()
		if a.RawFlags&unix.IFF_UP == 0 || a.MTU != mtu {
			t.Errorf("flags %x, MTU %d, want up and %d", a.RawFlags, a.MTU, mtu)
		}
		addrs, err := m.nl.AddrList(linkOf(t, m, name), netlink.FAMILY_ALL)
		do(err)
		if len(addrs) != 0 {
			t.Errorf("it has addresses: %v", addrs)
		}
		for sysctl, want := range map[string]string{"ipv4/conf/" + name + "/forwarding": "1", "ipv6/conf/" + name + "/forwarding": "1", "ipv6/conf/" + name + "/disable_ipv6": "1"} {
			if got, err := m.readSysctl("net/" + sysctl); err != nil || got != want {
				t.Errorf("%s is %q, %v; want %s", sysctl, got, err, want)
			}
		}
	}
	if linkOf(t, m, name).Attrs().RawFlags&unix.IFF_UP != 0 {
		t.Error("it is up before anybody asked")
	}
	do(m.RaiseCover(c))
	is(1450)
	// The pod's MTU grows, which macvlan does not follow by itself.
	do(m.nl.LinkSetMTU(veth, 1500))
	do(m.nl.LinkSetDown(linkOf(t, m, name)))
	do(m.RaiseCover(c))
	is(1500)

	all, err := m.Covers()
	if err != nil || len(all) != 1 || all[index] != c {
		t.Errorf("there are %v, %v", all, err)
	}
	devices, err := m.Devices()
	do(err)
	for _, d := range devices {
		if d.Name == name {
			t.Errorf("it is taken for a device of the node: %+v", d)
		}
	}
	do(m.RemoveCover(c))
	do(m.RemoveCover(c))
	if all, err = m.Covers(); err != nil || len(all) != 0 {
		t.Errorf("removed, and there are %v, %v", all, err)
	}

	// Another has the veth.
	do(m.nl.LinkAdd(&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "other", ParentIndex: index}, Mode: netlink.MACVLAN_MODE_PASSTHRU}))
	if _, err := m.MakeCover(index, pod); err == nil || !strings.Contains(err.Error(), pod) || !strings.Contains(err.Error(), "another program") {
		t.Errorf("over what another has: %v", err)
	}
	do(m.nl.LinkDel(linkOf(t, m, "other")))
	c, err = m.MakeCover(index, pod)
	do(err)
	do(m.nl.LinkDel(veth))
	if all, err = m.Covers(); err != nil || len(all) != 0 {
		t.Errorf("the veth went, and there are %v, %v", all, err)
	}
	do(m.RemoveCover(c))
}
