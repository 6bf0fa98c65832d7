package endpoint

import (
	"context"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// awaitUp returns when the kernel has an interface in operation. A veth that
// is only set up drops what is sent through it until its carrier event has
// been handled, and a pod's first packet must not be that.
func awaitUp(ctx context.Context, ns netns.NsHandle, h *netlink.Handle, name string) error {
	events := make(chan netlink.LinkUpdate, 16)
	done := make(chan struct{})
	defer func() {
		close(done)
		go func() { // the sender must not be left waiting for a reader
			for range events {
			}
		}()
	}()
	err := netlink.LinkSubscribeWithOptions(events, done, netlink.LinkSubscribeOptions{Namespace: &ns})
	if err != nil {
		close(events) // nobody sends
		return fmt.Errorf("follow interface %s: %w", name, err)
	}
	for {
		link, err := h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("interface %s is %s, not up: %w", name, link.Attrs().OperState, context.Cause(ctx))
		case _, open := <-events:
			if !open {
				return fmt.Errorf("interface %s: the kernel's events ended", name)
			}
		}
	}
}
