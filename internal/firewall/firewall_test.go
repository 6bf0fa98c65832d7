package firewall

import (
	"net/netip"
	"strings"
	"testing"
)

var tunnelled = Packet{
	Device: "eth0", Src: netip.MustParseAddr("172.31.0.3"), Dst: netip.MustParseAddr("172.31.0.2"), Proto: 17, Port: 4789,
}

func TestIPTables(t *testing.T) {
	for _, c := range []struct {
		name, policy, rules string
		want                string // begins the rule that drops; "" = none
		sure                bool
	}{
		{"nothing", "ACCEPT", "", "", false},
		{"policy", "DROP", "", "policy drop", true},
		{"port", "ACCEPT", "-A INPUT -p udp -m udp --dport 4789 -j DROP", "-A INPUT -p udp", true},
		{"reject", "ACCEPT", "-A INPUT -p udp -m udp --dport 4780:4790 -j REJECT --reject-with icmp-port-unreachable", "-A INPUT -p udp", true},
		{"other port", "ACCEPT", "-A INPUT -p udp -m udp --dport 4788 -j DROP", "", false},
		{"tcp", "ACCEPT", "-A INPUT -p tcp -m tcp --dport 4789 -j DROP", "", false},
		{"several ports", "ACCEPT", "-A INPUT -p udp -m multiport --dports 53,4000:5000 -j DROP", "-A INPUT -p udp", true},
		{"other device", "ACCEPT", "-A INPUT -i eth1 -p udp -j DROP", "", false},
		{"devices", "ACCEPT", "-A INPUT -i eth+ -p udp -j DROP", "-A INPUT -i eth+", true},
		{"not that device", "ACCEPT", "-A INPUT ! -i lo -j DROP", "-A INPUT ! -i lo", true},
		{"other source", "ACCEPT", "-A INPUT -s 10.0.0.0/8 -j DROP", "", false},
		{"let in before", "DROP", "-A INPUT -s 172.31.0.0/24 -p udp -m udp --dport 4789 -j ACCEPT", "", false},
		{"known connections alone", "DROP", "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "policy drop", true},
		{"new ones, too", "DROP", "-A INPUT -m state --state NEW,ESTABLISHED -j ACCEPT", "", false},
		{"chain", "ACCEPT", ":MINE - [0:0]\n-A INPUT -p udp -j MINE\n-A MINE -m comment --comment \"no -j ACCEPT here\" -j DROP", "-A MINE", true},
		{"chain that returns", "ACCEPT", ":MINE - [0:0]\n-A INPUT -p udp -j MINE\n-A MINE -s 172.31.0.3/32 -j RETURN\n-A MINE -j DROP", "", false},
		{"chain for others", "ACCEPT", ":MINE - [0:0]\n-A INPUT -p tcp -j MINE\n-A MINE -j DROP", "", false},
		{"goto", "DROP", ":MINE - [0:0]\n-A INPUT -p udp -g MINE\n-A INPUT -j ACCEPT\n-A MINE -p tcp -j ACCEPT", "policy drop", true},
		{"log", "ACCEPT", "-A INPUT -p udp -j LOG --log-prefix \"x \"\n-A INPUT -p tcp -j DROP", "", false},
		{"perhaps let in", "DROP", "-A INPUT -m set --match-set nodes src -j ACCEPT", "policy drop", false},
		{"perhaps dropped", "ACCEPT", "-A INPUT -p udp -m udp --dport 4789 -m limit --limit 1/s -j DROP", "-A INPUT -p udp", false},
		{"not about us", "ACCEPT", "-A INPUT -m recent --rcheck -j DROP", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			set, err := IPTables("iptables-legacy", "ip", "*filter\n:INPUT "+c.policy+" [0:0]\n:FORWARD DROP [0:0]\n"+c.rules+"\nCOMMIT\n")
			if err != nil {
				t.Fatal(err)
			}
			check(t, set, tunnelled, c.want, c.sure)
			if got := set.ForwardDrops(); len(got) != 1 || got[0] != "iptables-legacy, table ip filter, chain FORWARD" {
				t.Errorf("forwarding: %q", got)
			}
		})
	}
	set, err := IPTables("iptables-legacy", "ip", "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p ipencap -j DROP\nCOMMIT\n*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n")
	if err != nil {
		t.Fatal(err)
	}
	check(t, set, tunnelled, "", false)
	inIP := tunnelled
	inIP.Proto, inIP.Port = 4, 0
	check(t, set, inIP, "-A PREROUTING", true)
	six := tunnelled
	six.Src, six.Dst = netip.MustParseAddr("fd00::3"), netip.MustParseAddr("fd00::2")
	check(t, set, six, "", false)
	if _, err := IPTables("iptables", "ip", "*filter\n-A GONE -j DROP\n"); err == nil {
		t.Error("a rule without its chain is taken")
	}
}

func check(t *testing.T, set Ruleset, p Packet, want string, sure bool) {
	t.Helper()
	d, dropped := set.Input(p)
	switch {
	case dropped != (want != ""):
		t.Errorf("dropped: %v (%v), want %q", dropped, d, want)
	case dropped && (!strings.HasPrefix(d.Rule, want) || d.Sure != sure):
		t.Errorf("%+v, want %q, sure %v", d, want, sure)
	}
}

// As nft 1.0.6 prints them.
func TestNFT(t *testing.T) {
	const port = `{"match":{"op":"==","left":{"payload":{"protocol":"udp","field":"dport"}},"right":%}}`
	match := func(right string) string { return strings.ReplaceAll(port, "%", right) }
	for _, c := range []struct {
		name, policy, exprs string
		want                string
		sure                bool
	}{
		{"nothing", "accept", `{"counter":{"packets":0,"bytes":0}}`, "", false},
		{"policy", "drop", `{"counter":{"packets":0,"bytes":0}}`, "policy drop", true},
		{"port", "accept", match("4789") + `,{"drop":null}`, "rule with handle 5", true},
		{"reject", "accept", match("4789") + `,{"log":null},{"reject":{"type":"icmpx"}}`, "rule with handle 5", true},
		{"other port", "accept", match("4788") + `,{"drop":null}`, "", false},
		{"set", "accept", match(`{"set":[53,{"range":[4780,4790]}]}`) + `,{"drop":null}`, "rule", true},
		{"range", "accept", match(`{"range":[4790,4800]}`) + `,{"drop":null}`, "", false},
		{"let in", "drop", match("4789") + `,{"accept":null}`, "", false},
		{"tcp", "accept", `{"match":{"op":"==","left":{"payload":{"protocol":"tcp","field":"dport"}},"right":4789}},{"drop":null}`, "", false},
		{"named set", "accept", `{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":"@nodes"}},{"drop":null}`, "rule", true},
		{"not in it", "accept", `{"match":{"op":"!=","left":{"payload":{"protocol":"ip","field":"saddr"}},"right":"@nodes"}},{"drop":null}`, "", false},
		{"state", "drop", `{"match":{"op":"in","left":{"ct":{"key":"state"}},"right":["established","related"]}},{"accept":null}`, "policy drop", true},
		{"loopback", "drop", `{"match":{"op":"==","left":{"meta":{"key":"iif"}},"right":"lo"}},{"accept":null}`, "policy drop", true},
		{"devices", "drop", `{"match":{"op":"==","left":{"meta":{"key":"iifname"}},"right":{"set":["eth0","eth1"]}}},{"accept":null}`, "", false},
		{"chain", "accept", `{"jump":{"target":"other"}}`, "rule with handle 6", true},
		{"verdict map", "accept", `{"vmap":{"key":{"payload":{"protocol":"udp","field":"dport"}},"data":{"set":[[53,{"accept":null}],[4789,{"drop":null}]]}}}`, "rule", true},
		{"named verdict map", "accept", `{"vmap":{"key":{"payload":{"protocol":"udp","field":"dport"}},"data":"@ports"}}`, "rule", true},
		{"no such verdict map", "accept", `{"vmap":{"key":{"payload":{"protocol":"udp","field":"dport"}},"data":"@gone"}}`, "", false},
		{"limit", "drop", `{"limit":{"rate":10}},{"accept":null}`, "policy drop", false},
		{"unknown", "accept", match("4789") + `,{"xt":{"type":"match","name":"u32"}},{"drop":null}`, "rule", false},
		{"other family", "accept", `{"match":{"op":"!=","left":{"payload":{"protocol":"ip6","field":"saddr"}},"right":"fd00::1"}},{"drop":null}`, "", false},
		{"other protocol's port", "accept", `{"match":{"op":"!=","left":{"payload":{"protocol":"tcp","field":"dport"}},"right":22}},{"drop":null}`, "", false},
		{"all other ports", "accept", `{"match":{"op":"!=","left":{"payload":{"protocol":"udp","field":"dport"}},"right":53}},{"drop":null}`, "rule", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			set, err := NFT([]byte(`{"nftables":[{"metainfo":{"version":"1.0.6"}},
				{"set":{"family":"inet","name":"nodes","table":"fw","elem":["10.0.0.1",{"prefix":{"addr":"172.31.0.0","len":24}}]}},
				{"map":{"family":"inet","name":"ports","table":"fw","type":"inet_service","map":"verdict","elem":[[53,{"accept":null}],[4789,{"drop":null}]]}},
				{"chain":{"family":"inet","table":"fw","name":"other","handle":1}},
				{"chain":{"family":"inet","table":"fw","name":"in","type":"filter","hook":"input","prio":0,"policy":"`+c.policy+`"}},
				{"chain":{"family":"ip","table":"filter","name":"INPUT","type":"filter","hook":"input","prio":0,"policy":"drop"}},
				{"rule":{"family":"inet","table":"fw","chain":"in","handle":5,"expr":[`+c.exprs+`]}},
				{"rule":{"family":"inet","table":"fw","chain":"other","handle":6,"expr":[`+match("4789")+`,{"drop":null}]}}]}`),
				func(family, table string) bool { return family == "ip" && table == "filter" })
			if err != nil {
				t.Fatal(err)
			}
			check(t, set, tunnelled, c.want, c.sure)
		})
	}
	if _, err := NFT([]byte("no json"), func(string, string) bool { return false }); err == nil {
		t.Error("anything is taken")
	}
}
