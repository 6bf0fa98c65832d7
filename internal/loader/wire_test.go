package loader

import (
	"context"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// With from_pod_wire alone on it, a pod's veth takes an ingress qdisc as the
// bandwidth plugin adds it, before and after; the device over it has the
// pod's programs. Both are there after restarts and other loads, and go.
func TestWire(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		pod := veth(t, "pwwire")
		over := &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Name: "pwover", ParentIndex: pod}, Mode: netlink.MACVLAN_MODE_PASSTHRU}
		must(t, netlink.LinkAdd(over))
		device := index(t, "pwover")
		d := load(t, cfg)
		if d.TakesIngress() != cfg.ForceClsact {
			t.Errorf("takes the place of an ingress qdisc: %v", d.TakesIngress())
		}
		attach := func() {
			t.Helper()
			must(t, d.AttachWire(ctx, pod, "pwwire"))
			must(t, d.AttachPod(ctx, device, "pwover"))
		}
		is := func(what string) {
			t.Helper()
			if repaired, err := d.Verify(ctx); err != nil || len(repaired) != 0 {
				t.Errorf("%s: repaired %q, %v", what, repaired, err)
			}
			for ifindex, want := range map[int][]string{pod: {"from_pod_wire"}, device: {"from_pod", "to_pod"}} {
				if got, err := Programs(ifindex); err != nil || !slices.Equal(got, want) {
					t.Errorf("%s: programs of device %d: %v, %v, want %v", what, ifindex, got, err, want)
				}
			}
			one(t, cfg, device, false, "from_pod")
			one(t, cfg, device, true, "to_pod")
		}
		attach()
		is("attached")
		qdisc := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: pod, Parent: netlink.HANDLE_INGRESS, Handle: netlink.MakeHandle(0xffff, 0)}}
		must(t, netlink.QdiscAdd(qdisc))
		is("an ingress qdisc")
		attach()
		is("attached again")
		d = restart(t, d)
		is("restart")
		attach()
		must(t, d.SetOverlay(ctx, d.cfg.OverlayIfindex+7))
		is("another load")
		// Somebody takes it away.
		must(t, unpinned(t, d, hookKey{pod, hookWire}))
		if repaired, err := d.Verify(ctx); err != nil || len(repaired) != 1 {
			t.Errorf("repaired %q, %v", repaired, err)
		}
		is("repaired")
		must(t, d.Detach(ctx, device))
		must(t, d.Detach(ctx, pod))
		for _, ifindex := range []int{pod, device} {
			if got, err := Programs(ifindex); err != nil || len(got) != 0 {
				t.Errorf("left on device %d: %v, %v", ifindex, got, err)
			}
		}
		if got := ls(t, linksDir(cfg.BPFFS)); slices.ContainsFunc(got, func(name string) bool { k, ok := parsePin(name); return ok && k.ifindex == pod }) {
			t.Errorf("left pinned: %v", got)
		}
		attach()
		must(t, d.Close())
		must(t, Cleanup(cfg.BPFFS))
		if got, err := Programs(pod); err != nil || len(got) != 0 {
			t.Errorf("cleanup has left %v, %v", got, err)
		}
	})
}

// unpinned detaches a link behind the datapath's back.
func unpinned(t *testing.T, d *Datapath, key hookKey) error {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.attached[key].link.Detach()
}

// Where our filters are on a pod's veth itself, the kernel has no place for
// such a qdisc: that is what the device over it is for.
func TestNoIngressBesideFilters(t *testing.T) {
	cfg := Config{BPFFS: bpffs(t), ForceClsact: true, FlowsMax: 1024, FlowsNewMax: 1024}
	pod := veth(t, "pwpod")
	must(t, load(t, cfg).AttachPod(context.Background(), pod, "pwpod"))
	qdisc := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: pod, Parent: netlink.HANDLE_INGRESS, Handle: netlink.MakeHandle(0xffff, 0)}}
	if err := netlink.QdiscAdd(qdisc); err != unix.EEXIST {
		t.Errorf("an ingress qdisc beside our filters: %v", err)
	}
}
