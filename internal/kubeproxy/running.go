package kubeproxy

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// metricsPort is where kube-proxy has its metrics, unless told otherwise, and
// says in what mode it works.
const metricsPort = 10249

const askTimeout = 2 * time.Second

// running says by what a kube-proxy of this network namespace is seen. A
// container sees no processes of the node: there the port tells.
func running(ctx context.Context) (string, error) {
	if pid, err := process(); err != nil || pid != "" {
		return pid, err
	}
	listeners, err := listenersOn(metricsPort)
	if err != nil {
		return "", err
	}
	for _, a := range listeners {
		if mode := proxyMode(ctx, a); mode != "" {
			return fmt.Sprintf("it answers on %s, in mode %s", a, mode), nil
		}
	}
	return "", nil
}

// process looks for one by its name.
func process() (string, error) {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return "", fmt.Errorf("network namespace: %w", err)
	}
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return "", err
	}
	for _, name := range names {
		// What cannot be read has ended meanwhile, or is none of ours to see.
		comm, err := os.ReadFile(name)
		if err != nil || strings.TrimSpace(string(comm)) != "kube-proxy" {
			continue
		}
		dir := filepath.Dir(name)
		if ns, err := os.Readlink(filepath.Join(dir, "ns/net")); err == nil && ns == own && !zombie(dir) {
			return "process " + filepath.Base(dir), nil
		}
	}
	return "", nil
}

func zombie(dir string) bool {
	b, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, "Z") || strings.HasPrefix(rest, "X")
}

// listenersOn are the addresses that somebody listens on at a port, as one can
// call them.
func listenersOn(port uint16) (out []netip.AddrPort, err error) {
	for _, name := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile("/proc/thread-self/net/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // no IPv6
		}
		if err != nil {
			return nil, fmt.Errorf("listening sockets: %w", err)
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 4 || f[3] != "0A" { // TCP_LISTEN
				continue
			}
			if a, ok := procAddr(f[1]); ok && a.Port() == port && !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
	}
	return out, nil
}

// procAddr reads an address as /proc/net/tcp has it: words of the machine's
// byte order (both that Go's 64-bit ports and podweir know are little-endian),
// and the port.
func procAddr(s string) (netip.AddrPort, bool) {
	host, portText, ok := strings.Cut(s, ":")
	port, err := strconv.ParseUint(portText, 16, 16)
	raw, err2 := hex.DecodeString(host)
	if !ok || err != nil || err2 != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		slices.Reverse(raw[i : i+4])
	}
	a, ok := netip.AddrFromSlice(raw)
	switch {
	case !ok:
		return netip.AddrPort{}, false
	case a == netip.IPv4Unspecified():
		a = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case a == netip.IPv6Unspecified():
		a = netip.IPv6Loopback()
	}
	return netip.AddrPortFrom(a.Unmap(), uint16(port)), true
}

// proxyMode asks a kube-proxy for its mode; who else may listen has no such
// answer. The socket is made by this thread, in its network namespace.
func proxyMode(ctx context.Context, a netip.AddrPort) string {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", a.String())
	if err != nil {
		return ""
	}
	defer conn.Close()
	if end, ok := ctx.Deadline(); ok && conn.SetDeadline(end) != nil {
		return ""
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+a.String()+"/proxyMode", nil)
	if err != nil || req.Write(conn) != nil {
		return ""
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64))
	mode := strings.TrimSpace(string(body))
	if err != nil || resp.StatusCode != http.StatusOK || !slices.Contains([]string{"iptables", "ipvs", "nftables"}, mode) {
		return ""
	}
	return mode
}
