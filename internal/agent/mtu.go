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
	var mtu tunnel.MTU
	if device := a.deviceMTU(); device != 0 {
		mtu = a.opt.Mode.MTU(device, w.self.Addr)
		for _, cidr := range w.self.PodCIDRs {
			if cidr.Addr().Is6() {
				// Below, the device cuts what is too large for the wire.
				mtu = tunnel.MTU{Pod: max(mtu.Pod, minIPv6), Pod6: max(mtu.Pod6, minIPv6), Tunnel: max(mtu.Tunnel, minIPv6)}
			}
		}
	}
	if a.opt.MTU != 0 {
		mtu = a.opt.Mode.FixedMTU(a.opt.MTU, mtu)
	}
	if mtu.Pod != 0 {
		w.mtu = mtu
	}
	return mtu.Tunnel
}

// tellMTU has pods follow. The ways to nodes have been written before: a pod
// that sent more than they said would be told so, and remember it.
func (a *Agent) tellMTU() {
	mtu := a.world.mtu
	if mtu.Pod == 0 {
		return
	}
	was, was6 := int(a.mtu.Swap(int64(mtu.Pod))), int(a.mtu6.Swap(int64(mtu.Pod6)))
	if was != mtu.Pod || was6 != mtu.Pod6 {
		a.log.Info("MTU of pods", "mtu", mtu.Pod, "ipv6", mtu.Pod6, "was", was)
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
