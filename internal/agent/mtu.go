package agent

import (
	"net/netip"
	"time"

	"github.com/podweir/podweir/internal/node"
	"github.com/podweir/podweir/internal/tunnel"
)

// minIPv6 is the least that every link must carry whole for IPv6 (RFC 8200 5).
// The kernel takes the addresses of an interface with less away.
const minIPv6 = 1280

// syncMTU works out how large packets of pods may be. It returns what the
// tunnel's device gets; 0 = not known yet.
func (a *Agent) syncMTU() int {
	w := &a.world
	device := a.deviceMTU()
	if device == 0 && a.opt.MTU == 0 {
		return 0
	}
	overlay := a.opt.MTU
	if overlay == 0 {
		overlay = tunnel.MTU(device, w.self.Addr)
		// Below, the device cuts what is too large for the wire.
		for _, cidr := range w.self.PodCIDRs {
			if cidr.Addr().Is6() {
				overlay = max(overlay, minIPv6)
			}
		}
	}
	w.mtu = overlay
	if !a.opt.Mode.Tunnels() && a.opt.MTU == 0 {
		w.mtu = device
	}
	return overlay
}

// tellMTU has pods follow. The ways to nodes have been written before: a pod
// that sent more than they said would be told so, and remember it.
func (a *Agent) tellMTU() {
	mtu := int64(a.world.mtu)
	if mtu == 0 {
		return
	}
	if was := a.mtu.Swap(mtu); was != mtu {
		a.log.Info("MTU of pods", "mtu", mtu, "was", was)
		select {
		case a.resized <- struct{}{}:
		default:
		}
	}
}

// deviceMTU is the MTU of the devices by which the other nodes are reached,
// the smallest if they differ; without other nodes of the one that holds the
// node's address. What a single route carries less is the matter of that way
// (see nodeEntry), not of all pods.
func (a *Agent) deviceMTU() int {
	mtu := 0
	for _, way := range a.world.ways {
		if mtu == 0 || way.Link < mtu {
			mtu = way.Link
		}
	}
	if mtu == 0 {
		d, _ := node.Holding(a.world.devices, a.world.self.Addr)
		mtu = d.MTU
	}
	return mtu
}

// learnedFor is how long a router's word about the way to a node counts: as
// long as in the kernel (net.ipv4.route.mtu_expires).
const learnedFor = 10 * time.Minute

// learned is what the datapath heard from a router about the way to a node.
type learned struct {
	mtu   int // of what the tunnel carries
	until time.Time
}

// readLearned looks for what the datapath has lowered in pw_nodes by itself
// (pw_learn_mtu in bpf/icmp.h), keeps it for a while and then lets it go: the
// next packet that is too big brings it back.
func (a *Agent) readLearned() {
	w := &a.world
	now := a.opt.Now()
	for addr, l := range w.learned {
		if now.After(l.until) {
			delete(w.learned, addr)
		}
	}
	for _, n := range w.nodes {
		id, ok := a.peers.byName[n.Name]
		if !ok {
			continue
		}
		wrote, ok := a.peers.nodes.Actual(id)
		if !ok || wrote.Mtu == 0 {
			continue
		}
		has, ok, err := a.dp.Maps().Nodes.Get(id)
		if err != nil || !ok || has.Addr != wrote.Addr || has.Mtu >= wrote.Mtu {
			continue // an error shows where the map is written
		}
		a.log.Info("a router says that the way to a node is narrower", "node", n.Name, "mtu", has.Mtu, "was", wrote.Mtu)
		if w.learned == nil {
			w.learned = make(map[netip.Addr]learned)
		}
		w.learned[n.Addr] = learned{mtu: int(has.Mtu), until: now.Add(learnedFor)}
	}
}
