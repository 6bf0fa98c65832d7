package firewall

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Packet is what is asked about: one that arrives for the node and belongs to
// no connection yet.
type Packet struct {
	Device   string
	Src, Dst netip.Addr
	Proto    uint8
	Port     uint16 // destination's; 0 = the protocol has none
}

// answer of a condition.
type answer uint8

const (
	no answer = iota
	perhaps
	yes
)

func is(b bool) answer {
	if b {
		return yes
	}
	return no
}

// cond is one condition of a rule.
type cond struct {
	holds func(Packet) answer
	// names: it is about the protocol or the port.
	names bool
}

type verdict uint8

const (
	goOn verdict = iota
	accept
	drop
	giveBack // return
	jump
	leave // goto
)

type rule struct {
	text   string
	conds  []cond
	do     verdict
	target string // of jump and leave
}

// chain of one table. Without a hook it is one that others lead to.
type chain struct {
	program  string // that it was read with
	family   string // ip, ip6, inet
	table    string
	name     string
	hook     string // prerouting, input, forward
	priority int
	drops    bool // the policy
	rules    []rule
}

func (c *chain) String() string {
	return fmt.Sprintf("%s, table %s %s, chain %s", c.program, c.family, c.table, c.name)
}

// Ruleset is all chains of the node.
type Ruleset struct{ chains []*chain }

// Add joins what another program printed.
func (r *Ruleset) Add(other Ruleset) { r.chains = append(r.chains, other.chains...) }

// Drop is a verdict against a packet.
type Drop struct {
	Program, Family, Table, Chain string
	// Rule as its program writes it; "policy drop" for the chain's policy.
	Rule string
	// Sure: nothing in the rule, or before it, is beyond this package.
	Sure bool
}

func (d Drop) String() string {
	return fmt.Sprintf("%s, table %s %s, chain %s: %s", d.Program, d.Family, d.Table, d.Chain, d.Rule)
}

// Input says what drops a packet for the node, if anything may: the first
// verdict that is sure, else the first that is not.
func (r Ruleset) Input(p Packet) (Drop, bool) {
	var unsure *Drop
	for _, hook := range []string{"prerouting", "input"} {
		for _, c := range r.base(hook) {
			if !c.sees(p) {
				continue
			}
			w := walk{set: r, packet: p}
			end := w.chain(c, 0)
			if end == goOn || end == giveBack {
				if c.drops {
					w.against(c, "policy drop", !w.doubt)
				}
			}
			if w.found != nil && w.found.Sure {
				return *w.found, true
			}
			if unsure == nil {
				unsure = w.found
			}
		}
	}
	if unsure != nil {
		return *unsure, true
	}
	return Drop{}, false
}

// ForwardDrops names the chains that forward nothing unless a rule says so.
func (r Ruleset) ForwardDrops() (out []string) {
	for _, c := range r.base("forward") {
		if c.drops {
			out = append(out, c.String())
		}
	}
	return out
}

// base are the chains of a hook in the order that packets meet them.
func (r Ruleset) base(hook string) (out []*chain) {
	for _, c := range r.chains {
		if c.hook == hook {
			out = append(out, c)
		}
	}
	slices.SortStableFunc(out, func(a, b *chain) int { return cmp.Compare(a.priority, b.priority) })
	return out
}

func (c *chain) sees(p Packet) bool {
	switch c.family {
	case "inet":
		return true
	case "ip6":
		return p.Dst.Is6()
	}
	return c.family == "ip" && p.Dst.Is4()
}

func (r Ruleset) find(from *chain, name string) *chain {
	for _, c := range r.chains {
		if c.program == from.program && c.family == from.family && c.table == from.table && c.name == name {
			return c
		}
	}
	return nil
}

// walk is a packet's way through a base chain.
type walk struct {
	set    Ruleset
	packet Packet
	doubt  bool // an earlier rule may have accepted it
	found  *Drop
}

func (w *walk) against(c *chain, text string, sure bool) {
	if w.found == nil || sure && !w.found.Sure {
		w.found = &Drop{c.program, c.family, c.table, c.name, text, sure}
	}
}

// deepest is how far chains may lead into each other: loops are refused by the
// kernel.
const deepest = 32

func (w *walk) chain(c *chain, depth int) verdict {
	if c == nil || depth > deepest {
		return goOn
	}
	for _, r := range c.rules {
		a, names := yes, false
		for _, k := range r.conds {
			a = min(a, k.holds(w.packet))
			names = names || k.names
		}
		if a == no {
			continue
		}
		do := r.do
		before := w.doubt
		if do == jump || do == leave {
			w.doubt = w.doubt || a == perhaps
			end := w.chain(w.set.find(c, r.target), depth+1)
			if a == yes && (end == accept || end == drop) {
				return end
			}
			if a == yes && do == leave {
				return giveBack
			}
			// What the chain left in doubt stays so.
			w.doubt = w.doubt && (before || end == accept || w.doubt && a == yes)
			continue
		}
		switch {
		case do == goOn:
		case do == drop && a == yes:
			w.against(c, r.text, !w.doubt)
			return drop
		case do == drop:
			// A limit or the like: of interest if it is about such packets.
			if names {
				w.against(c, r.text, false)
			}
		case a == yes:
			return do
		default:
			w.doubt = true
		}
	}
	return goOn
}
