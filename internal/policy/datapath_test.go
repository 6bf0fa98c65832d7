package policy_test

import (
	gomaps "maps"
	"net/netip"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/internal/policy"
)

// datapath holds the maps and looks verdicts up as the programs do.
type datapath struct {
	addrs    map[netip.Addr]uint32
	prefixes map[maps.PrefixKey]uint32
	lengths  [129]bool // that prefixes ever had
	policy   policy.Table
	class    [65536]uint16
	tables   map[netip.Addr][2]uint32 // pw_endpoints, by address
}

func newDatapath() *datapath {
	world, err := maps.ToPrefix(netip.MustParsePrefix("::/0"))
	if err != nil {
		panic(err)
	}
	d := &datapath{
		addrs:    map[netip.Addr]uint32{},
		prefixes: map[maps.PrefixKey]uint32{world: maps.IdentityWorld},
		policy:   policy.Table{},
		tables:   map[netip.Addr][2]uint32{},
	}
	d.lengths[0] = true
	return d
}

// load puts a whole output in, without any of the care of a change.
func load(out *policy.Output, in *policy.Input) *datapath {
	d := newDatapath()
	gomaps.Copy(d.addrs, out.Addrs)
	for p, id := range out.Prefixes {
		d.setPrefix(p, id)
	}
	for _, t := range out.Tables {
		gomaps.Copy(d.policy, t)
	}
	for _, c := range out.PortClasses {
		for p := int(c.Lo); p <= int(c.Hi); p++ {
			d.class[p] = c.Class
		}
	}
	d.tables = endpointTables(out, in)
	return d
}

func endpointTables(out *policy.Output, in *policy.Input) map[netip.Addr][2]uint32 {
	t := map[netip.Addr][2]uint32{}
	for _, p := range in.Pods {
		if ep, ok := out.Endpoints[key(&p)]; ok {
			for _, a := range p.Addrs {
				t[a] = [2]uint32{ep.In, ep.Out}
			}
		}
	}
	return t
}

func (d *datapath) setPrefix(p netip.Prefix, id uint32) {
	k, err := maps.ToPrefix(p)
	if err != nil {
		panic(err)
	}
	d.prefixes[k] = id
	d.lengths[k.Len] = true
}

func (d *datapath) delPrefix(p netip.Prefix) {
	k, err := maps.ToPrefix(p)
	if err != nil {
		panic(err)
	}
	if k.Len == 0 {
		d.prefixes[k] = maps.IdentityWorld
		return
	}
	delete(d.prefixes, k)
}

// identity is the lookup of an address: exact, then the longest prefix.
func (d *datapath) identity(a netip.Addr) uint32 {
	if id, ok := d.addrs[a]; ok {
		return id
	}
	b := maps.ToAddr(a).B
	for bits := 128; bits >= 0; bits-- {
		if bits < 128 {
			b[bits/8] &^= 1 << (7 - bits%8)
		}
		if !d.lengths[bits] {
			continue
		}
		if id, ok := d.prefixes[maps.PrefixKey{Len: uint32(bits), Addr: b}]; ok {
			return id
		}
	}
	return maps.IdentityUnknown
}

// allows answers for the endpoint with address self.
func (d *datapath) allows(self netip.Addr, q question) bool {
	return d.tables[self][q.dir] == 0 || d.entry(self, q).Verdict == maps.VerdictAllow
}

// entry finds the entry that answers; none is the empty one.
func (d *datapath) entry(self netip.Addr, q question) maps.PolicyEntry {
	table := d.tables[self][q.dir]
	identity := d.identity(q.peer)
	probes := []maps.PolicyKey{
		{Identity: identity, Proto: q.proto, Port: q.port, Kind: maps.PolicyPort},
		{Identity: identity, Proto: q.proto, Port: d.class[q.port], Kind: maps.PolicyClass},
		{Identity: identity, Kind: maps.PolicyAny},
		{Kind: maps.PolicyDefault},
	}
	for _, k := range probes {
		k.Table = table
		if k.Kind == maps.PolicyDefault && (table&maps.TableDefault == 0 || identity == maps.IdentityUnknown) {
			break
		}
		if e, ok := d.policy[k]; ok {
			return e
		}
	}
	return maps.PolicyEntry{}
}
