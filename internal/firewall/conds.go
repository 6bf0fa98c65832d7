package firewall

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// unknown is a condition that is beyond this package.
func unknown() cond { return cond{holds: func(Packet) answer { return perhaps }} }

func always() cond { return cond{holds: func(Packet) answer { return yes }} }

func both(a, b cond) cond {
	return cond{names: a.names || b.names, holds: func(p Packet) answer { return min(a.holds(p), b.holds(p)) }}
}

func ofFamily(v4 bool) cond {
	return cond{holds: func(p Packet) answer { return is(p.Dst.Is4() == v4) }}
}

func not(c cond) cond {
	return cond{names: c.names, holds: func(p Packet) answer { return yes - c.holds(p) }}
}

// anyOf holds if one of them does.
func anyOf(list []cond) cond {
	out := cond{holds: func(p Packet) answer {
		a := no
		for _, c := range list {
			a = max(a, c.holds(p))
		}
		return a
	}}
	for _, c := range list {
		out.names = out.names || c.names
	}
	return out
}

// protocols by the names that the programs print (/etc/protocols).
var protocols = map[string]uint8{
	"icmp": 1, "igmp": 2, "ipencap": 4, "tcp": 6, "udp": 17, "ipv6": 41, "gre": 47, "esp": 50, "ah": 51,
	"ipv6-icmp": 58, "icmpv6": 58, "ipip": 94, "sctp": 132, "udplite": 136,
}

func ofProto(name string) cond {
	if name == "all" || name == "0" {
		return always()
	}
	n, known := protocols[name]
	if v, err := strconv.ParseUint(name, 10, 8); err == nil {
		n, known = uint8(v), true
	}
	return cond{names: true, holds: func(p Packet) answer {
		if !known {
			return no // another than we know by name
		}
		return is(p.Proto == n)
	}}
}

// toPort: "4789" or "4780:4790".
func toPort(text, sep string) cond {
	lo, hi, isRange := strings.Cut(text, sep)
	if !isRange {
		hi = lo
	}
	from, err1 := strconv.ParseUint(lo, 10, 16)
	to, err2 := strconv.ParseUint(hi, 10, 16)
	if err1 != nil || err2 != nil {
		return cond{names: true, holds: func(Packet) answer { return perhaps }}
	}
	return cond{names: true, holds: func(p Packet) answer {
		return is(p.Port != 0 && from <= uint64(p.Port) && uint64(p.Port) <= to)
	}}
}

// within: an address or a prefix.
func within(text string, end func(Packet) netip.Addr) cond {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		var a netip.Addr
		if a, err = netip.ParseAddr(text); err == nil {
			prefix = netip.PrefixFrom(a, a.BitLen())
		}
	}
	if err != nil {
		return unknown()
	}
	return cond{holds: func(p Packet) answer {
		if !end(p).IsValid() {
			return perhaps
		}
		return is(prefix.Contains(end(p)))
	}}
}

func source(p Packet) netip.Addr      { return p.Src }
func destination(p Packet) netip.Addr { return p.Dst }

// byDevice: a name, or its beginning with sign after it.
func byDevice(name, sign string) cond {
	return cond{holds: func(p Packet) answer {
		if begin, ok := strings.CutSuffix(name, sign); ok {
			return is(strings.HasPrefix(p.Device, begin))
		}
		return is(p.Device == name)
	}}
}

// inState: of connection tracking. The packet is the first of a connection.
func inState(states []string) cond {
	return cond{holds: func(Packet) answer {
		return is(slices.ContainsFunc(states, func(s string) bool { return strings.EqualFold(s, "new") }))
	}}
}
