package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// watchGroups are the kinds of events that matter: devices, addresses, routes
// and the rules that lead to them, of both families, changes of forwarding and
// rp_filter, qdiscs and filters.
var watchGroups = [...]uint{
	unix.RTNLGRP_LINK,
	unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
	unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_NEXTHOP,
	unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
	unix.RTNLGRP_TC,
}

// Watch sends on the channel returned whenever devices, addresses, routes,
// settings or qdiscs have moved, until ctx ends; signals that nobody has taken yet
// become one. Events that were lost (the socket's buffer overran) count as
// one more change, so that the reader, who reads everything anew, misses
// nothing. When Watch returns, the subscription is in place.
func (m *Manager) Watch(ctx context.Context) (<-chan struct{}, error) {
	sock, err := m.subscribe()
	if err != nil {
		return nil, err
	}
	out := make(chan struct{}, 1)
	signal := func() {
		select {
		case out <- struct{}{}:
		default:
		}
	}
	go func() {
		for {
			m.follow(ctx, sock, signal)
			for {
				if ctx.Err() != nil {
					return
				}
				if sock, err = m.subscribe(); err == nil {
					break
				}
				m.log.Error("cannot follow the node's devices; trying again", "error", err)
				select {
				case <-ctx.Done():
					return
				case <-time.After(time.Second):
				}
			}
			signal()
		}
	}()
	return out, nil
}

func (m *Manager) subscribe() (*nl.NetlinkSocket, error) {
	return nl.SubscribeAt(m.ns, netns.None(), unix.NETLINK_ROUTE, watchGroups[:]...)
}

// follow signals every message until the socket fails or ctx ends.
func (m *Manager) follow(ctx context.Context, sock *nl.NetlinkSocket, signal func()) {
	var once sync.Once
	stop := context.AfterFunc(ctx, func() { once.Do(sock.Close) })
	defer func() {
		stop()
		once.Do(sock.Close)
	}()
	for {
		msgs, _, err := sock.Receive()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
				continue
			}
			m.log.Warn("lost netlink events; reading everything anew", "error", err)
			return
		}
		for _, msg := range msgs {
			if relevant(msg.Header.Type, msg.Data) {
				signal()
				break
			}
		}
	}
}

// relevant leaves out what changes all the time and is no concern of ours:
// routes in the kernel's caches and the local table, which follows addresses.
func relevant(kind uint16, data []byte) bool {
	if kind != unix.RTM_NEWROUTE && kind != unix.RTM_DELROUTE {
		return true
	}
	if len(data) < unix.SizeofRtMsg {
		return false
	}
	const flagsAt, table = 8, 4
	cloned := nl.NativeEndian().Uint32(data[flagsAt:])&unix.RTM_F_CLONED != 0
	return !cloned && data[table] != unix.RT_TABLE_LOCAL
}
