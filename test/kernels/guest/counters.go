package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// A counter of pw_metrics.
type counter struct {
	reason maps.Reason
	hook   maps.Hook
	v6     bool
}

const (
	fromPod     = bpf.DpPwHookPW_FROM_POD
	toPod       = bpf.DpPwHookPW_TO_POD
	fromNetdev  = bpf.DpPwHookPW_FROM_NETDEV
	fromOverlay = bpf.DpPwHookPW_FROM_OVERLAY
	toOverlay   = bpf.DpPwHookPW_TO_OVERLAY
	atSocket    = bpf.DpPwHookPW_SOCKET
)

type counters map[counter]uint64

func (n *node) counters() (counters, error) {
	samples, err := n.maps().Metrics.Read()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", n.name, err)
	}
	c := counters{}
	for _, s := range samples {
		c[counter{s.Reason, s.Hook, s.IPv6}] = s.Packets
	}
	return c, nil
}

// growth is what fn adds to a node's counters.
func (n *node) growth(fn func() error) (counters, error) {
	before, err := n.counters()
	if err != nil {
		return nil, err
	}
	failed := fn()
	after, err := n.counters()
	if err != nil {
		return nil, errors.Join(failed, err)
	}
	for c, v := range after {
		if after[c] = v - before[c]; after[c] == 0 {
			delete(after, c)
		}
	}
	if failed != nil {
		return nil, fmt.Errorf("%w (%s counted:%v)", failed, n.name, after)
	}
	return after, nil
}

func (c counters) String() string {
	var b strings.Builder
	for k, v := range c {
		fmt.Fprintf(&b, " %s/%s/%s=%d", maps.ReasonName(k.reason), maps.HookName(k.hook), family(k.v6), v)
	}
	return b.String()
}

func (c counters) at(reason maps.Reason, hook maps.Hook, v6 bool) uint64 {
	return c[counter{reason, hook, v6}]
}

// want compares one counter's growth: exactly n, or at least -n.
func (c counters) want(n int, reason maps.Reason, hook maps.Hook, v6 bool) error {
	got := c.at(reason, hook, v6)
	if n >= 0 && got == uint64(n) || n < 0 && got >= uint64(-n) {
		return nil
	}
	how := "exactly"
	if n < 0 {
		how, n = "at least", -n
	}
	return fmt.Errorf("%s at %s counted %d packets, want %s %d; all:%v",
		maps.ReasonName(reason), maps.HookName(hook), got, how, n, c)
}

// noDrops fails on any drop but those of the tunnel device's own chatter
// (the stack announces itself there by multicast) and those provoked.
func (w *world) noDrops() error {
	var errs []error
	for _, n := range []*node{w.a, w.b} {
		c, err := n.counters()
		if err != nil {
			return err
		}
		for k, v := range c {
			switch {
			case k.reason < bpf.DpPwReasonPW_DROP_MALFORMED:
			case k.reason == bpf.DpPwReasonPW_DROP_MULTICAST && k.hook == toOverlay:
			case k.reason == bpf.DpPwReasonPW_DROP_NO_SERVICE_PORT && n == w.a:
			case k.reason == bpf.DpPwReasonPW_DROP_POLICY_INGRESS && k.hook == fromPod && n == w.a:
			default:
				errs = append(errs, fmt.Errorf("%s dropped %d packets at %s: %s",
					n.name, v, maps.HookName(k.hook), maps.ReasonName(k.reason)))
			}
		}
	}
	return errors.Join(errs...)
}
