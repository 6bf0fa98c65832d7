package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// checkSockets moves this process into a cgroup and has the node call
// services: translated at connect(), while a pod's process is not.
func (w *world) checkSockets(ctx context.Context, cgroup string) (err error) {
	leave, err := enter(cgroup)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.a.dp.AttachSockets(ctx, ""), leave()) }()
	if err := w.a.dp.AttachSockets(ctx, cgroup); err != nil {
		return err
	}
	if at, attached := w.a.dp.Sockets(); at != cgroup || !attached {
		return fmt.Errorf("sockets of %q, attached %v, want those of %s", at, attached, cgroup)
	}
	return each(func(v6 bool) error {
		at := netip.AddrPortFrom(remoteService.ip(v6), servicePort)
		grown, err := w.a.growth(func() error {
			conn, err := w.a.dial("tcp", at)
			if err != nil {
				return err
			}
			defer conn.Close()
			if got := conn.RemoteAddr().String(); got != at.String() {
				return fmt.Errorf("the peer of a connection to %v is called %s", at, got)
			}
			return errors.Join(echoOver(conn, 2000), finish(conn), w.client.tcpEcho(at, 300))
		})
		if err != nil {
			return err
		}
		known := 0
		err = w.a.maps().SockRev.Each(func(uint64, maps.SockAsked) error { known++; return nil })
		if err == nil && known != 0 {
			err = fmt.Errorf("%d closed sockets are known still", known)
		}
		return errors.Join(err, grown.want(1, bpf.DpPwReasonPW_SOCK_TRANSLATED, atSocket, v6))
	})
}

// enter moves this process into a cgroup, which is made if it is not there.
func enter(cgroup string) (leave func() error, err error) {
	if err := os.MkdirAll(cgroup, 0o755); err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	move := func(to string) error {
		if err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			return fmt.Errorf("move to cgroup %s: %w", to, err)
		}
		return nil
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(own)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			// The given one lies right below the mount.
			back := filepath.Join(filepath.Dir(cgroup), path)
			return func() error { return move(back) }, move(cgroup)
		}
	}
	return nil, fmt.Errorf("no cgroup v2 in /proc/self/cgroup: %s", own)
}
