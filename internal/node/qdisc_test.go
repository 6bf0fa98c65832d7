package node

import (
	"maps"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func linkOf(t *testing.T, m *Manager, name string) netlink.Link {
	t.Helper()
	l, err := m.nl.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// tbf is the root qdisc that limits what is sent by a device.
func tbf(t *testing.T, m *Manager, dev string) netlink.Qdisc {
	t.Helper()
	return &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: linkOf(t, m, dev).Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       1 << 20, Limit: 1 << 20, Buffer: 1 << 20,
	}
}

// What others put on a pod's device, on its own or beside what we use there.
func TestQdiscs(t *testing.T) {
	m := inNewNetns(t)
	const pod = "pw0123456789a"
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: pod, MTU: 1500}, PeerName: "pod0"}
	if err := m.nl.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	index := linkOf(t, m, pod).Attrs().Index
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	expect := func(what string, want Qdisc) {
		t.Helper()
		all := map[int]Qdisc{}
		if want != (Qdisc{}) {
			all[index] = want
		}
		if got, err := m.Qdiscs(); err != nil || !maps.Equal(got, all) {
			t.Errorf("%s: %+v, %v, want %+v", what, got, err, all)
		}
	}
	attrs := func(parent, handle uint32) netlink.QdiscAttrs {
		return netlink.QdiscAttrs{LinkIndex: index, Parent: parent, Handle: handle}
	}
	filter := func(parent uint32) netlink.Filter {
		return &netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: parent, Priority: 7, Protocol: unix.ETH_P_ALL},
			ClassId:     netlink.MakeHandle(1, 1),
		}
	}
	expect("nothing", Qdisc{})
	do(m.nl.QdiscAdd(tbf(t, m, "eth0"))) // no pod's
	expect("another device", Qdisc{})
	do(m.nl.QdiscAdd(tbf(t, m, pod)))
	expect("a limit", Qdisc{Out: "tbf"})
	do(m.nl.QdiscDel(tbf(t, m, pod)))
	expect("no limit", Qdisc{})

	ingress := &netlink.Ingress{QdiscAttrs: attrs(netlink.HANDLE_INGRESS, netlink.MakeHandle(0xffff, 0))}
	do(m.nl.QdiscAdd(ingress))
	expect("ingress without filters", Qdisc{})
	do(m.nl.FilterAdd(filter(netlink.MakeHandle(0xffff, 0))))
	expect("ingress with a filter", Qdisc{In: "filters"})
	do(m.nl.QdiscDel(ingress))

	clsact := &netlink.Clsact{QdiscAttrs: attrs(netlink.HANDLE_CLSACT, netlink.MakeHandle(0xffff, 0))}
	do(m.nl.QdiscAdd(clsact))
	expect("clsact without filters", Qdisc{})
	do(m.nl.FilterAdd(filter(netlink.HANDLE_MIN_EGRESS)))
	expect("a filter at egress", Qdisc{Out: "filters"})
	do(m.nl.FilterAdd(filter(netlink.HANDLE_MIN_INGRESS)))
	expect("a filter at ingress, too", Qdisc{Out: "filters", In: "filters"})
	do(m.nl.QdiscAdd(tbf(t, m, pod)))
	expect("everything", Qdisc{Out: "tbf", In: "filters"})
	do(m.nl.QdiscDel(clsact))
	expect("a limit again", Qdisc{Out: "tbf"})
}
