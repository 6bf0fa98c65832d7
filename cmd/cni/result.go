package main

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podweir/podweir/internal/endpoint"
)

// scopeLink is RT_SCOPE_LINK.
const scopeLink = 253

// result describes ep as the specification asks for it.
func result(ep endpoint.Endpoint, dns types.DNS) *types100.Result {
	const podInterface = 1
	r := &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		DNS:        dns,
		Interfaces: []*types100.Interface{
			{Name: ep.HostIfName, Mac: ep.HostMAC.String(), Mtu: ep.MTU},
			{Name: ep.IfName, Mac: ep.MAC.String(), Mtu: ep.MTU, Sandbox: ep.Netns},
		},
	}
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

func ipNet(a netip.Addr, bits int) net.IPNet {
	return net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}
}

// resultAddrs returns the addresses in a result.
func resultAddrs(r types.Result) ([]netip.Addr, error) {
	res, err := types100.NewResultFromResult(r)
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, ip := range res.IPs {
		a, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return nil, fmt.Errorf("%v is no IP address", ip.Address.IP)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}
