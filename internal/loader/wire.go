package loader

import (
	"context"
	"errors"
	"math"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// haveTCX asks for a link to a device that there is not.
func (d *Datapath) haveTCX() bool {
	l, err := link.AttachTCX(link.TCXOptions{Interface: math.MaxInt32, Program: d.objs.FromPod, Attach: ebpf.AttachTCXIngress})
	if err == nil {
		_ = l.Close() // never
	}
	if errors.Is(err, ebpf.ErrNotSupported) {
		d.log.Info("no tcx in this kernel, using clsact")
		return false
	}
	return true
}

// TakesIngress tells whether the kernel refuses others an ingress qdisc on a
// device where programs of ours are, and us a clsact where they have one: it
// has place for one of both, and without tcx the programs need it.
func (d *Datapath) TakesIngress() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.clsact
}

// AttachWire attaches from_pod_wire to a pod's host-side veth: no frame of the
// pod's reaches the stack there, but what takes frames from over the veth. That
// device is then the pod's, see [Datapath.AttachPod].
func (d *Datapath) AttachWire(ctx context.Context, ifindex int, name string) error {
	return d.attach(ctx, ifindex, name, hookWire)
}
