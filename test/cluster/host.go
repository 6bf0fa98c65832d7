package cluster

import (
	"context"
	"fmt"
	"net/netip"
)

// AddHost adds a machine that is no node of podweir's: a namespace with
// nothing in it, and with an eth0 on the switch if addresses are given. A
// name is a port of the switch, so it has 15 characters at most.
func (c *Cluster) AddHost(ctx context.Context, name string, addrs ...netip.Prefix) (*Netns, error) {
	n, err := c.newNetns(name)
	if err != nil {
		return nil, err
	}
	if len(addrs) == 0 {
		return n, nil
	}
	if err := c.attach(ctx, n, name, addrs, nil); err != nil {
		return nil, fmt.Errorf("host %s: %w", name, err)
	}
	return n, nil
}
