package services

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/test/cluster"
)

const shaper = "shaper"

// filterPods leads what every pod sends through an ifb of its node, and waits
// until it takes that way.
func (w *world) filterPods() {
	w.Helper()
	for _, n := range w.Nodes {
		w.on(n.Netns, "ip link add %s up type ifb", shaper)
		w.on(n.Netns, "tc qdisc add dev %s root tbf rate 800mbit burst 10kb limit 10mb", shaper)
		out, err := n.Exec(w.ctx, "ip", "-o", "link", "show", "type", "veth")
		w.must(err)
		pods := 0
		for line := range strings.Lines(out) {
			dev, _, _ := strings.Cut(strings.Fields(line)[1], "@")
			if !node.IsHostVeth(dev) {
				continue
			}
			pods++
			w.on(n.Netns, "tc qdisc add dev %s ingress", dev)
			w.on(n.Netns, "tc filter add dev %s parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev %s", dev, shaper)
		}
		w.must(cluster.Eventually(w.ctx, func() error {
			set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
			if err != nil {
				return err
			}
			defer set.Close()
			entries, err := set.Filtered.Dump()
			if err == nil && len(entries) != 2*pods {
				err = fmt.Errorf("%s: %d of %d pods are filtered", n.NodeName, len(entries)/2, pods)
			}
			return err
		}))
	}
}

// All pods with a limit for what they send (N22), and a firewall that forwards
// nothing: everything works as without, and no packet of a pod gets there.
func TestN22FilteredPods(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"vxlan", "direct", "ipip dsr"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := behindFirewall(t, mode)
			w.filterPods()
			w.withoutForwarding()
			w.noneForwarded()
			for _, n := range w.Nodes {
				out, err := n.Exec(w.ctx, "tc", "-s", "qdisc", "show", "dev", shaper)
				w.must(err)
				if strings.Contains(out, "Sent 0 bytes") {
					w.Errorf("%s: nothing went through the limit: %s", n.NodeName, out)
				}
			}
		})
	}
}
