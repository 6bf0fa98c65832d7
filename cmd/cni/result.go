package main

import (
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podweir/podweir/internal/endpoint"
)

// scopeLink is RT_SCOPE_LINK.
const scopeLink = 253

// result describes ep as the specification asks for it, after what earlier
// plugins of the list made.
func result(ep endpoint.Endpoint, dns types.DNS, prev *types100.Result) *types100.Result {
	r := &types100.Result{CNIVersion: types100.ImplementedSpecVersion, DNS: dns}
	if prev != nil {
		r.Interfaces, r.IPs, r.Routes = prev.Interfaces, prev.IPs, prev.Routes
		if dns.IsEmpty() {
			r.DNS = prev.DNS
		}
	}
	r.Interfaces = append(r.Interfaces,
		&types100.Interface{Name: ep.HostIfName, Mac: ep.HostMAC.String(), Mtu: ep.MTU},
		&types100.Interface{Name: ep.IfName, Mac: ep.MAC.String(), Mtu: ep.MTU, Sandbox: ep.Netns})
	podInterface := len(r.Interfaces) - 1
	for _, a := range ep.Addrs {
		gw := endpoint.Gateway(a)
		r.IPs = append(r.IPs, &types100.IPConfig{
			Interface: types100.Int(podInterface),
			Address:   ipNet(a, a.BitLen()),
			Gateway:   gw.AsSlice(),
		})
		unspecified := netip.IPv6Unspecified()
		if a.Is4() {
			unspecified = netip.IPv4Unspecified()
			r.Routes = append(r.Routes, &types.Route{Dst: ipNet(gw, gw.BitLen()), Scope: types100.Int(scopeLink)})
		}
		r.Routes = append(r.Routes, &types.Route{Dst: ipNet(unspecified, 0), GW: gw.AsSlice()})
	}
	return r
}

// told is what the result of the whole list says of the interface that is
// asked about: its addresses, and the MTU, which a later plugin may have made
// smaller. Addresses of other plugins' interfaces are none of its.
func told(prev *types100.Result, req endpoint.Request) (addrs []netip.Addr, mtu int, err error) {
	if prev == nil {
		return nil, 0, badConfig("prevResult is missing")
	}
	ours := func(i int) bool {
		return prev.Interfaces[i].Name == req.IfName && prev.Interfaces[i].Sandbox != ""
	}
	mtu = endpoint.MTUNotTold
	for i := range prev.Interfaces {
		if m := prev.Interfaces[i].Mtu; ours(i) && m > 0 {
			mtu = m
		}
	}
	for _, ip := range prev.IPs {
		if i := ip.Interface; i != nil {
			if *i < 0 || *i >= len(prev.Interfaces) {
				return nil, 0, badConfig("prevResult: address %v is of interface %d, there are %d", ip.Address.IP, *i, len(prev.Interfaces))
			}
			if !ours(*i) {
				continue
			}
		}
		a, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return nil, 0, badConfig("prevResult: %v is no IP address", ip.Address.IP)
		}
		addrs = append(addrs, a.Unmap())
	}
	if len(addrs) == 0 {
		return nil, 0, badConfig("prevResult: it has no addresses of %s", req.IfName)
	}
	return addrs, mtu, nil
}

func ipNet(a netip.Addr, bits int) net.IPNet {
	return net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}
}
