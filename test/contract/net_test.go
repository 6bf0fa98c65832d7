package contract

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podweir/podweir/test/cluster"
)

func serviceCIDR(name, prefix string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{prefix}},
	}
}

// netlinkIn runs fn with a netlink handle of the namespace.
func netlinkIn(n *cluster.Netns, fn func(*netlink.Handle) error) error {
	return n.Do(func() error {
		h, err := netlink.NewHandle()
		if err != nil {
			return err
		}
		defer h.Close()
		return fn(h)
	})
}

// hasRoute says whether a node routes a prefix into a device ("" = blackhole).
func hasRoute(n *cluster.Node, prefix, device string) error {
	p := netip.MustParsePrefix(prefix)
	return netlinkIn(n.Netns, func(h *netlink.Handle) error {
		family := netlink.FAMILY_V4
		if p.Addr().Is6() {
			family = netlink.FAMILY_V6
		}
		routes, err := h.RouteList(nil, family)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if r.Dst == nil || r.Dst.String() != p.String() {
				continue
			}
			if device == "" {
				if r.Type == 6 { // RTN_BLACKHOLE
					return nil
				}
				return fmt.Errorf("%s: route to %s is no blackhole: %v", n.NodeName, prefix, r)
			}
			link, err := h.LinkByIndex(r.LinkIndex)
			if err != nil {
				return err
			}
			if link.Attrs().Name == device {
				return nil
			}
			return fmt.Errorf("%s: route to %s leads to %s", n.NodeName, prefix, link.Attrs().Name)
		}
		return errors.New(n.NodeName + ": no route to " + prefix)
	})
}
