package cli

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// flowView is one entry of the flow tables: one direction of a flow.
type flowView struct {
	Protocol string `json:"protocol"`
	// Source and Destination as the packets arrive.
	Source      string `json:"source"`
	Destination string `json:"destination"`
	// What they become; the same where nothing is translated.
	NewSource      string    `json:"newSource"`
	NewDestination string    `json:"newDestination"`
	From           placeView `json:"from"`
	To             placeView `json:"to"`
	// NextHop of what leaves by the wire.
	NextHop   string   `json:"nextHop,omitempty"`
	Direction string   `json:"direction"` // original or reply
	State     string   `json:"state"`     // new or confirmed
	Flags     []string `json:"flags,omitempty"`
	TCP       []string `json:"tcp,omitempty"`
	Verdict   string   `json:"verdict"`
	Reason    string   `json:"reason,omitempty"` // of a denial
	Rule      string   `json:"rule,omitempty"`
	RuleID    uint32   `json:"ruleID,omitempty"`
	Service   string   `json:"service,omitempty"`
	ServiceID uint32   `json:"serviceID,omitempty"`
	// Via is the node a source outside the cluster entered by, or enters by
	// and is not answered by.
	Via         string  `json:"via,omitempty"`
	AgeSeconds  float64 `json:"ageSeconds"`
	IdleSeconds float64 `json:"idleSeconds"`
	// Generations are fresh, or stale: the next packet is decided again.
	Generations string `json:"generations"`
	// Twin: the entry of the other direction exists.
	Twin bool `json:"twin"`

	original maps.FlowKey // of the pair, for sorting and filtering
	reply    bool
	end      flowEnds
}

// flowEnds are the ends of a flow as its initiator sees them.
type flowEnds struct {
	source, destination, translated netip.AddrPort
	from, to                        placeView
}

func (s *session) flowsCommand() *cobra.Command {
	var from, to, service, proto string
	c := &cobra.Command{
		Use:   "flows",
		Short: "List the entries of the flow tables, one for each direction",
		Long: `List the entries of the flow tables, one for each direction of a flow.

--from and --to select by the initiator's and the responder's end: an address
(10.244.80.65), an address and port (10.98.235.247:80), a range
(10.244.80.0/24), a pod of any node (default/web), a node, a device, or "host".
Both directions of a flow that matches are listed.

VERDICT is this node's, about its own pods: what another node denies is allow
here. A denied first packet makes no flow; deny is a running flow that policy
has turned against.

STATE: new (not answered, or answered once and not gone on with, as a DNS query)
or confirmed (the caller was seen again after an answer), what closed a TCP flow
(fin_orig, fin_reply, rst), midstream (picked up while it ran), direct (a client
outside that the backend's node answers by itself), stale (the next packet is
decided again), no-twin (the entry of the other direction is gone).`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFlowFlags(from, to, service, proto); err != nil {
				return err
			}
			return s.withMaps(func(m Maps) error {
				n, err := s.namesFor(cmd.Context(), m, api.PathStatus, api.PathServices, api.PathEndpoints, api.PathPolicy)
				if err != nil {
					return err
				}
				if n.everyPod == nil {
					n.askPods(cmd.Context(), s.env.DialAgent(s.socket), s.warn)
				}
				f, err := newFlowFilter(m, n, from, to, service, proto)
				if err != nil {
					return err
				}
				flows, err := readFlows(m, n, s.env.Now())
				if err != nil {
					return err
				}
				flows = slices.DeleteFunc(flows, func(v flowView) bool { return !f.match(&v) })
				return s.print(struct {
					Flows []flowView `json:"flows"`
				}{flows}, flowTable(flows))
			})
		},
	}
	c.Flags().StringVar(&from, "from", "", "only flows begun by this address, range, pod, node or device")
	c.Flags().StringVar(&to, "to", "", "only flows to this address, range, pod, node or device, before or after translation")
	c.Flags().StringVar(&service, "service", "", "only flows to this service: namespace/name, namespace/name:port or its id")
	c.Flags().StringVar(&proto, "proto", "", "only flows of this protocol: tcp, udp, sctp, icmp, icmpv6 or a number")
	return s.kubeconfigFlag(c)
}

func flowTable(flows []flowView) *table {
	t := newTable("no flows", "PROTO", "SOURCE", "DESTINATION", "TRANSLATION", "FROM", "TO", "DIRECTION", "STATE",
		"VERDICT", "RULE", "+SERVICE", "+AGE", "IDLE", "+GENERATIONS", "+TWIN", "+VIA")
	for _, f := range flows {
		var translation []string
		if f.NewSource != f.Source {
			translation = append(translation, "src="+f.NewSource)
		}
		if f.NewDestination != f.Destination {
			translation = append(translation, "dst="+f.NewDestination)
		}
		state := append([]string{f.State}, f.TCP...)
		for _, flag := range []string{"midstream", "direct"} {
			if slices.Contains(f.Flags, flag) {
				state = append(state, flag)
			}
		}
		if f.Generations == "stale" {
			state = append(state, "stale")
		}
		twin := "yes"
		if !f.Twin {
			state = append(state, "no-twin")
			twin = "no"
		}
		verdict := f.Verdict
		if f.Reason != "" {
			verdict += " (" + f.Reason + ")"
		}
		service := f.Service
		if service == "" && f.ServiceID != 0 {
			service = fmt.Sprintf("id %d", f.ServiceID)
		}
		t.add(f.Protocol, f.Source, f.Destination, strings.Join(translation, " "), f.From.String(), f.To.String(),
			f.Direction, strings.Join(state, ","), verdict, f.Rule, service,
			span(f.AgeSeconds), span(f.IdleSeconds), f.Generations, twin, f.Via)
	}
	return t
}

// readFlows returns all entries, the two directions of a flow together.
func readFlows(m Maps, n *names, now uint64) ([]flowView, error) {
	confirmed, unconfirmed, err := m.Flows()
	if err != nil {
		return nil, err
	}
	gens := generations{m: m, seen: map[uint32]uint32{}}
	out := []flowView{}
	add := func(k maps.FlowKey, f maps.Flow) error {
		fresh, err := gens.fresh(f)
		if err != nil {
			return err
		}
		twin := twinKey(k, f)
		_, inConfirmed := confirmed[twin]
		_, inUnconfirmed := unconfirmed[twin]
		v := describeFlow(k, f, n, now)
		v.Twin = inConfirmed || inUnconfirmed
		v.Generations = "fresh"
		if !fresh {
			v.Generations = "stale"
		}
		out = append(out, v)
		return nil
	}
	for k, f := range confirmed {
		if err := add(k, f); err != nil {
			return nil, err
		}
	}
	for k, f := range unconfirmed {
		// A confirmed flow's old copy is left there to age.
		if _, moved := confirmed[k]; moved {
			continue
		}
		if err := add(k, f); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(out, func(a, b flowView) int {
		return cmp.Or(compareKeys(a.original, b.original), compareBool(a.reply, b.reply))
	})
	return out, nil
}

func describeFlow(k maps.FlowKey, f maps.Flow, n *names, now uint64) flowView {
	flags := maps.FlowFlagNames(f.Flags)
	has := func(name string) bool { return slices.Contains(flags, name) }
	v := flowView{
		Protocol:       maps.ProtoName(k.Proto),
		Source:         tupleEnd(k.Proto, k.Src, k.Sport),
		Destination:    tupleEnd(k.Proto, k.Dst, k.Dport),
		NewSource:      tupleEnd(k.Proto, f.Src, f.Sport),
		NewDestination: tupleEnd(k.Proto, f.Dst, f.Dport),
		From:           n.end(f.From, k.Src),
		Direction:      "original",
		State:          "new",
		TCP:            maps.TCPStateNames(f.Tcp),
		Verdict:        maps.VerdictName(f.Verdict),
		RuleID:         f.Rule,
		Rule:           n.rule(f.Rule),
		ServiceID:      f.Service,
		Service:        n.serviceName(f.Service),
		AgeSeconds:     since(f.Created, now),
		IdleSeconds:    since(f.LastSeen, now),
		original:       k,
	}
	backend, port := f.Dst, f.Dport
	v.To = n.end(f.To, f.Dst)
	if f.Frame != 0 {
		// The other end's half of a connection is not seen here.
		if !has("reply") {
			backend, port = f.Nexthop, uint16(f.Mac[0])<<8|uint16(f.Mac[1])
			v.NewDestination, v.To = tupleEnd(k.Proto, backend, port), n.end(f.To, backend)
		}
		if !slices.Contains(v.TCP, "fin_orig") {
			v.TCP = slices.DeleteFunc(v.TCP, func(s string) bool { return s == "fin_reply" })
		}
	} else if f.Nexthop != (maps.Addr{}) {
		v.NextHop = maps.FromAddr(f.Nexthop).String()
	}
	if f.Reason != 0 {
		v.Reason = maps.ReasonName(maps.Reason(f.Reason))
	}
	if via := max(k.Via, f.Entry); via != 0 {
		v.Via = n.node(uint32(via))
	}
	if has("confirmed") {
		v.State = "confirmed"
	}
	v.end = flowEnds{
		source:      addrPort(k.Src, k.Sport),
		destination: addrPort(k.Dst, k.Dport),
		translated:  addrPort(backend, port),
		from:        v.From, to: v.To,
	}
	if has("reply") {
		v.Direction, v.reply = "reply", true
		v.original = twinKey(k, f)
		// The other direction, seen from this one.
		v.end = flowEnds{
			source:      addrPort(f.Dst, f.Dport),
			destination: addrPort(f.Src, f.Sport),
			translated:  addrPort(k.Src, k.Sport),
			from:        v.To, to: v.From,
		}
	}
	if f.Frame != 0 || f.Entry != 0 {
		v.Flags = append(v.Flags, "direct")
	}
	for _, name := range flags {
		if name == "replied" || name == "midstream" {
			v.Flags = append(v.Flags, name)
		}
	}
	return v
}

// twinKey is the key of the other direction: pw_twin_key of bpf/flow.h.
func twinKey(k maps.FlowKey, f maps.Flow) maps.FlowKey {
	return maps.FlowKey{Src: f.Dst, Dst: f.Src, Sport: f.Dport, Dport: f.Sport, Via: f.TwinVia, Proto: k.Proto}
}

// generations compares with pw_gens, each slot read once.
type generations struct {
	m    Maps
	seen map[uint32]uint32
}

func (g generations) fresh(f maps.Flow) (bool, error) {
	for _, ref := range []maps.GenRef{f.SrcGen, f.DstGen} {
		gen, ok := g.seen[ref.Slot]
		if !ok {
			var err error
			if gen, err = g.m.Generation(ref.Slot); err != nil {
				return false, err
			}
			g.seen[ref.Slot] = gen
		}
		if gen != ref.Gen {
			return false, nil
		}
	}
	return true, nil
}

func addrPort(a maps.Addr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(maps.FromAddr(a), port)
}

// tupleEnd prints one end of a tuple: ports with a colon, the identifier of
// an ICMP echo with a hash.
func tupleEnd(proto uint8, a maps.Addr, port uint16) string {
	switch {
	case proto == maps.ProtoTCP || proto == maps.ProtoUDP || proto == maps.ProtoSCTP:
		return addrPort(a, port).String()
	case port != 0:
		return fmt.Sprintf("%s#%d", maps.FromAddr(a), port)
	}
	return maps.FromAddr(a).String()
}

// since is the time from then to now in seconds; the datapath's clock is
// coarse and may be a little ahead.
func since(then, now uint64) float64 {
	if then >= now {
		return 0
	}
	return time.Duration(now - then).Round(time.Millisecond).Seconds()
}

// span prints seconds the short way: 0.2s, 12s, 3m12s, 5h7m, 2d3h.
func span(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

func compareKeys(a, b maps.FlowKey) int {
	return cmp.Or(
		cmp.Compare(a.Proto, b.Proto),
		maps.FromAddr(a.Src).Compare(maps.FromAddr(b.Src)),
		cmp.Compare(a.Sport, b.Sport),
		maps.FromAddr(a.Dst).Compare(maps.FromAddr(b.Dst)),
		cmp.Compare(a.Dport, b.Dport),
		cmp.Compare(a.Via, b.Via))
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
