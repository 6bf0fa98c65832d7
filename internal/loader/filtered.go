package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
)

// FilterPod puts from_pod_judge in the place of from_pod on a pod's host-side
// veth, or from_pod back, without a moment in which there is neither. Until
// the map of filtered pods has the device, from_pod_judge does what from_pod
// does. Repeating it is no error, nor is it one to end it for a device that is
// gone.
func (d *Datapath) FilterPod(ctx context.Context, ifindex int, name string, on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	from, to := hookKey{ifindex, hookFromPod}, hookKey{ifindex, hookJudgePod}
	if !on {
		from, to = to, from
	}
	if _, done := d.attached[to]; done {
		return nil // [Datapath.Verify] sees to it
	}
	a := d.attached[from]
	if a != nil {
		alive, err := d.alive(a)
		if err != nil {
			return err
		}
		if !alive {
			d.forget(a)
			a = nil
		}
	}
	switch {
	case a != nil:
		return d.exchange(a, to)
	case on:
		return d.attachOne(to, name)
	}
	return nil
}

// exchange puts the program of another key in an attachment's place.
func (d *Datapath) exchange(a *attachment, to hookKey) error {
	if a.link == nil {
		// The same handle: the kernel replaces the filter, its name too.
		if err := replaceFilter(to, d.program(to.hook)); err != nil {
			return fmt.Errorf("replace %v: %w", a, err)
		}
	} else {
		if err := a.link.Update(d.program(to.hook)); err != nil {
			return fmt.Errorf("replace %v by %s: %w", a, to.hook.program, err)
		}
		pin := to.pin(d.cfg.BPFFS)
		if err := os.Remove(pin); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove stale pin %s: %w", pin, err)
		}
		// Moves it. A process that ends right here leaves the old name, by
		// which the next load puts the old program back.
		if err := a.link.Pin(pin); err != nil {
			return fmt.Errorf("pin %v at %s: %w", a, pin, err)
		}
	}
	delete(d.attached, a.key)
	a.key = to
	d.attached[to] = a
	return nil
}

// AttachCover attaches from_pod_send to the device over a filtered pod's veth.
func (d *Datapath) AttachCover(ctx context.Context, ifindex int, name string) error {
	return d.attach(ctx, ifindex, name, hookSendPod)
}

// Filtered are the veths that have from_pod_judge, by their index, in order.
func (d *Datapath) Filtered() []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []int
	for key := range d.attached {
		if key.hook == hookJudgePod {
			out = append(out, key.ifindex)
		}
	}
	slices.Sort(out)
	return out
}
