package firewall

import (
	"encoding/json"
	"fmt"
	"strings"
)

type nftObject struct {
	Chain *struct {
		Family, Table, Name, Type, Hook, Policy string
		Prio                                    int
	}
	Set, Map *nftElements
	Rule     *struct {
		Family, Table, Chain string
		Handle               int
		Expr                 []map[string]json.RawMessage
	}
}

// nftElements is a named set or map.
type nftElements struct {
	Family, Table, Name string
	Elem                []json.RawMessage
}

// NFT reads what "nft -j list ruleset" prints. Tables that skip names are left
// out: iptables' own, of which its save programs say more.
func NFT(data []byte, skip func(family, table string) bool) (Ruleset, error) {
	var set Ruleset
	var doc struct{ Nftables []nftObject }
	if err := json.Unmarshal(data, &doc); err != nil {
		return set, fmt.Errorf("nft -j list ruleset: %w", err)
	}
	chains := make(map[[3]string]*chain)
	sets := make(map[[3]string][]json.RawMessage)
	for _, o := range doc.Nftables {
		for _, e := range []*nftElements{o.Set, o.Map} {
			if e != nil {
				sets[[3]string{e.Family, e.Table, e.Name}] = e.Elem
			}
		}
		switch {
		case o.Chain != nil && !skip(o.Chain.Family, o.Chain.Table):
			c := &chain{
				program: "nft", family: o.Chain.Family, table: o.Chain.Table, name: o.Chain.Name,
				hook: o.Chain.Hook, priority: o.Chain.Prio, drops: o.Chain.Policy == "drop",
			}
			chains[[3]string{c.family, c.table, c.name}] = c
			set.chains = append(set.chains, c)
		}
	}
	for _, o := range doc.Nftables {
		if o.Rule == nil {
			continue
		}
		c := chains[[3]string{o.Rule.Family, o.Rule.Table, o.Rule.Chain}]
		if c == nil {
			continue
		}
		named := func(name string) []json.RawMessage { return sets[[3]string{c.family, c.table, name}] }
		c.rules = append(c.rules, nftRules(o.Rule.Handle, o.Rule.Expr, named)...)
	}
	return set, nil
}

// nftRules makes a rule of one of nft's, or several of one with a verdict map.
func nftRules(handle int, exprs []map[string]json.RawMessage, named func(string) []json.RawMessage) []rule {
	text, _ := json.Marshal(exprs)
	r := rule{text: fmt.Sprintf("rule with handle %d: %s", handle, text)}
	for _, e := range exprs {
		for kind, v := range e {
			switch kind {
			case "match":
				r.conds = append(r.conds, nftMatch(v, named))
			case "counter", "log", "comment", "mangle", "notrack", "ct helper":
			case "vmap":
				return nftMap(r, v, named)
			default:
				if do, target, ok := nftVerdict(kind, v); ok {
					r.do, r.target = do, target
				} else {
					r.conds = append(r.conds, unknown())
				}
			}
		}
	}
	return []rule{r}
}

func nftVerdict(kind string, v json.RawMessage) (verdict, string, bool) {
	switch kind {
	case "accept":
		return accept, "", true
	case "drop", "reject":
		return drop, "", true
	case "return":
		return giveBack, "", true
	case "jump", "goto":
		var to struct{ Target string }
		if json.Unmarshal(v, &to) != nil {
			return 0, "", false
		}
		if kind == "goto" {
			return leave, to.Target, true
		}
		return jump, to.Target, true
	}
	return 0, "", false
}

// nftMap is a rule for each element of a verdict map.
func nftMap(r rule, v json.RawMessage, named func(string) []json.RawMessage) (out []rule) {
	var m struct {
		Key  json.RawMessage
		Data json.RawMessage
	}
	if json.Unmarshal(v, &m) != nil {
		return nil
	}
	for _, el := range elements(m.Data, named) {
		var pair [2]json.RawMessage
		var does map[string]json.RawMessage
		if json.Unmarshal(el, &pair) != nil || json.Unmarshal(pair[1], &does) != nil {
			continue
		}
		one := rule{text: r.text, conds: append([]cond(nil), r.conds...)}
		in, c := nftCompare(m.Key, pair[0], named)
		one.conds = append(one.conds, both(in, c))
		for kind, v := range does {
			if do, target, ok := nftVerdict(kind, v); ok {
				one.do, one.target = do, target
			}
		}
		out = append(out, one)
	}
	return out
}

func nftMatch(v json.RawMessage, named func(string) []json.RawMessage) cond {
	var m struct {
		Op          string
		Left, Right json.RawMessage
	}
	if json.Unmarshal(v, &m) != nil {
		return unknown()
	}
	in, c := nftCompare(m.Left, m.Right, named)
	switch m.Op {
	case "==", "in", "":
		return both(in, c)
	case "!=":
		return both(in, not(c))
	}
	return unknown()
}

// nftCompare is left == right; right may be a set. In says which packets have a
// left at all: others do not match, whatever the operator.
func nftCompare(left, right json.RawMessage, named func(string) []json.RawMessage) (in, c cond) {
	var l struct {
		Payload struct{ Protocol, Field string }
		Meta    struct{ Key string }
		Ct      struct{ Key string }
	}
	in = always()
	if json.Unmarshal(left, &l) != nil {
		return in, unknown()
	}
	var of func(string) cond
	field := l.Payload.Protocol + " " + l.Payload.Field
	switch l.Payload.Protocol {
	case "ip", "ip6":
		in = ofFamily(l.Payload.Protocol == "ip")
	case "udp", "tcp", "sctp", "icmp", "icmpv6":
		in = ofProto(l.Payload.Protocol)
	}
	switch {
	case l.Ct.Key == "state":
		var states []string
		for _, el := range elements(right, named) {
			states = append(states, plain(el))
		}
		return in, inState(states)
	case l.Meta.Key == "l4proto", field == "ip protocol", field == "ip6 nexthdr":
		of = ofProto
	case l.Meta.Key == "iifname", l.Meta.Key == "iif":
		of = func(s string) cond { return byDevice(s, "*") }
	case l.Payload.Field == "dport":
		of = func(s string) cond { return toPort(s, "-") }
	case field == "ip saddr", field == "ip6 saddr":
		of = func(s string) cond { return within(s, source) }
	case field == "ip daddr", field == "ip6 daddr":
		of = func(s string) cond { return within(s, destination) }
	default:
		return in, unknown()
	}
	var list []cond
	for _, el := range elements(right, named) {
		list = append(list, of(plain(el)))
	}
	return in, anyOf(list)
}

// elements of a set, named or not; anything else is one element.
func elements(v json.RawMessage, named func(string) []json.RawMessage) []json.RawMessage {
	var name string
	if json.Unmarshal(v, &name) == nil {
		if set, ok := strings.CutPrefix(name, "@"); ok {
			return named(set)
		}
		return []json.RawMessage{v}
	}
	var list []json.RawMessage
	if json.Unmarshal(v, &list) == nil {
		return list
	}
	var set struct{ Set json.RawMessage }
	if json.Unmarshal(v, &set) == nil && len(set.Set) > 0 {
		if json.Unmarshal(set.Set, &list) == nil {
			return list
		}
		return []json.RawMessage{set.Set}
	}
	return []json.RawMessage{v}
}

// plain writes a value as text: 4789, "4780-4790", "172.31.0.0/24", "udp".
func plain(v json.RawMessage) string {
	var s string
	if json.Unmarshal(v, &s) == nil {
		return s
	}
	var o struct {
		Range  []json.RawMessage
		Prefix struct {
			Addr string
			Len  int
		}
		Elem struct{ Val json.RawMessage }
	}
	if json.Unmarshal(v, &o) == nil {
		switch {
		case len(o.Range) == 2:
			return plain(o.Range[0]) + "-" + plain(o.Range[1])
		case o.Prefix.Addr != "":
			return fmt.Sprintf("%s/%d", o.Prefix.Addr, o.Prefix.Len)
		case len(o.Elem.Val) > 0:
			return plain(o.Elem.Val)
		}
	}
	return string(v)
}
