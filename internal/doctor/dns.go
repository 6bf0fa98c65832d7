package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
)

// Route is the device that this host reaches an address by.
func (h osHost) Route(a netip.Addr) (string, error) {
	routes, err := netlink.RouteGet(a.Unmap().AsSlice())
	if err != nil {
		return "", err
	}
	if len(routes) == 0 || routes[0].LinkIndex == 0 {
		return "", errors.New("unreachable")
	}
	link, err := net.InterfaceByIndex(routes[0].LinkIndex)
	if err != nil {
		return "", err
	}
	return link.Name, nil
}

// dnsTries, each for dnsPatience: a datagram may be lost.
const (
	dnsTries    = 2
	dnsPatience = time.Second
)

// AskDNS wants any answer to a question. One that says that it cannot is an
// answer, too: which domain is the cluster's is not known here, and for others a
// resolver may depend on somebody else.
func (h osHost) AskDNS(ctx context.Context, server netip.AddrPort) error {
	var errs error
	for try := range dnsTries {
		err := askDNS(ctx, server, uint16(time.Now().UnixNano())+uint16(try))
		if err == nil {
			return nil
		}
		errs = err
	}
	return errs
}

func askDNS(ctx context.Context, server netip.AddrPort, id uint16) error {
	ctx, cancel := context.WithTimeout(ctx, dnsPatience)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "udp", server.String())
	if err != nil {
		return err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	// One question, recursion desired: an address of kubernetes.default.svc.
	q := binary.BigEndian.AppendUint16(nil, id)
	q = append(q, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	for _, label := range []string{"kubernetes", "default", "svc"} {
		q = append(append(q, byte(len(label))), label...)
	}
	q = append(q, 0, 0, 1, 0, 1)
	if _, err := c.Write(q); err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return err
		}
		const header, isAnswer = 12, 0x80
		if n >= header && binary.BigEndian.Uint16(buf) == id && buf[2]&isAnswer != 0 {
			return nil
		}
	}
}
