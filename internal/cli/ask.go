package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// mostBackends of a service are asked about.
const mostBackends = 64

// askView is the datapath's answer about one packet.
type askView struct {
	Source      askEnd `json:"source"`
	Destination askEnd `json:"destination"` // as called
	Protocol    string `json:"protocol"`
	Port        uint16 `json:"port,omitempty"` // as called
	// Service that the destination is a frontend of, and which of its
	// backends this is about.
	Service string  `json:"service,omitempty"`
	Backend *askEnd `json:"backend,omitempty"`
	// BackendPort is the port there, which policy looks at.
	BackendPort uint16 `json:"backendPort,omitempty"`
	// NotAsked is how many more backends there are that this node was not
	// asked about: of the last answer about a service.
	NotAsked int `json:"notAsked,omitempty"`
	// Verdict is allowed, denied, dropped (for another reason than policy) or
	// elsewhere: this node decides nothing about such packets.
	Verdict string `json:"verdict"`
	// Partial: another node decides about the other end.
	Partial bool      `json:"partial,omitempty"`
	Reason  string    `json:"reason,omitempty"` // of a drop
	From    placeView `json:"from"`
	To      placeView `json:"to"`
	Egress  halfView  `json:"egress"`  // of the source
	Ingress halfView  `json:"ingress"` // of the destination
}

// askEnd is one of two that talk.
type askEnd struct {
	Name string     `json:"name,omitempty"`
	Addr netip.Addr `json:"addr"`
}

func (e askEnd) String() string {
	if e.Name == "" {
		return e.Addr.String()
	}
	return fmt.Sprintf("%s (%v)", e.Name, e.Addr)
}

// halfView is what the policies of one end say.
type halfView struct {
	// Asked: the end is a pod of this node and its policies were asked.
	Asked bool `json:"asked"`
	// Table is 0 when the pod is not isolated.
	Table    uint32    `json:"table,omitempty"`
	Peer     *peerView `json:"peer,omitempty"`
	Verdict  string    `json:"verdict,omitempty"`
	RuleID   uint32    `json:"ruleID,omitempty"`
	Rule     string    `json:"rule,omitempty"`
	Policies []string  `json:"policies,omitempty"` // that isolate the pod
	// Text is the same as a sentence.
	Text string `json:"text,omitempty"`
}

func (s *session) askCommand() *cobra.Command {
	var from, to, port string
	cmd := &cobra.Command{
		Use:   "ask --from END --to END --port PORT[/PROTOCOL]",
		Short: "Ask the datapath whether one may talk to the other, and by which rule",
		Long: `Ask the datapath whether one may talk to the other, and by which rule.

An END is a pod (namespace/name, on any node), an address, or 'host' for this
node. --to may be a service (namespace/name, unless a pod has that name, too) or
an address of one: every backend is asked about, up to 64.
--port is the port that is called: 8080, 53/udp, 9000/sctp; or a protocol
without ports: icmp.

The programs' own decision about a first packet is made over the maps in force,
and changes nothing. A node decides about its own pods: the egress of a source
here, the ingress of a destination here. Of an end on another node the answer
says so; ask there as well.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			proto, number, err := parsePort(port)
			if err != nil {
				return err
			}
			for _, end := range []struct{ flag, value string }{{"--from", from}, {"--to", to}} {
				if _, err := netip.ParseAddr(end.value); err != nil && end.value != "host" && !validPod(end.value) {
					return usageError("%s %s: is neither a name (namespace/name), nor an address, nor host", end.flag, end.value)
				}
			}
			return s.withMaps(func(m Maps) error {
				n, err := s.namesFor(cmd.Context(), m, api.PathStatus, api.PathServices, api.PathEndpoints, api.PathPolicy)
				if err != nil {
					return err
				}
				q := asker{ctx: cmd.Context(), m: m, n: n, agent: s.env.DialAgent(s.socket)}
				views, err := q.ask(from, to, proto, number)
				if err != nil {
					return err
				}
				if s.output == "json" {
					return s.print(struct {
						Answers []askView `json:"answers"`
					}{views}, nil)
				}
				for i := range views {
					views[i].write(s.env.Stdout)
				}
				return nil
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "who talks: namespace/pod, an address, or host")
	f.StringVar(&to, "to", "", "to whom: namespace/name of a pod or service, an address of either, or host")
	f.StringVar(&port, "port", "", "port that is called, with /udp or /sctp if it is not TCP's; or icmp")
	for _, name := range []string{"from", "to", "port"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flags are those above
		}
	}
	return s.kubeconfigFlag(cmd)
}

// ICMP of the two families (IANA).
const protoICMP, protoICMPv6 = 1, 58

// parsePort reads "8080", "53/udp" or "icmp", which is either family's.
func parsePort(s string) (proto uint8, port uint16, err error) {
	if s == "icmp" {
		return protoICMP, 0, nil
	}
	number, name, slash := strings.Cut(s, "/")
	if !slash {
		name = "tcp"
	}
	n, err := strconv.ParseUint(number, 10, 16)
	for _, proto := range []uint8{maps.ProtoTCP, maps.ProtoUDP, maps.ProtoSCTP} {
		if err == nil && n > 0 && name == maps.ProtoName(proto) {
			return proto, uint16(n), nil
		}
	}
	return 0, 0, usageError("--port %s: is neither a port such as 8080, 53/udp or 9000/sctp, nor icmp", s)
}

// asker puts questions to the datapath and names what it answers.
type asker struct {
	ctx   context.Context
	m     Maps
	n     *names
	agent Agent
}

// ask asks about every pair of addresses of one family and every backend.
func (a *asker) ask(from, to string, proto uint8, port uint16) ([]askView, error) {
	sources, err := a.end("--from", from)
	if err != nil {
		return nil, err
	}
	targets, err := a.end("--to", to)
	if err != nil {
		return nil, err
	}
	out := []askView{}
	for _, src := range sources {
		for _, dst := range targets {
			if src.Addr.Is4() != dst.Addr.Is4() {
				continue
			}
			of := proto
			if of == protoICMP && !dst.Addr.Is4() {
				of = protoICMPv6
			}
			views, err := a.pair(src, dst, of, port)
			if err != nil {
				return nil, err
			}
			out = append(out, views...)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s and %s have no addresses of the same family", from, to)
	}
	return out, nil
}

func (a *asker) pair(src, dst askEnd, proto uint8, port uint16) ([]askView, error) {
	q := maps.Ask{Key: maps.FlowKey{Src: maps.ToAddr(src.Addr), Dst: maps.ToAddr(dst.Addr), Dport: port, Proto: proto}}
	var out []askView
	for q.Slot = 0; q.Slot == 0 || q.Slot < mostBackends; q.Slot++ {
		r, err := a.m.Ask(q)
		if err != nil {
			return nil, err
		}
		v := a.view(r)
		v.Source, v.Destination, v.Protocol, v.Port = src, dst, maps.ProtoName(proto), port
		a.explain(&v, r)
		if q.Slot+1 == mostBackends {
			v.NotAsked = max(0, int(r.Backends)-mostBackends)
		}
		out = append(out, v)
		if q.Slot+1 >= r.Backends {
			break
		}
	}
	return out, nil
}

// view says what the answer is; explain adds why.
func (a *asker) view(r maps.Ask) askView {
	v := askView{From: a.n.place(r.From), To: a.n.place(r.To), Verdict: "allowed"}
	if r.Reason != 0 {
		v.Reason = maps.ReasonName(maps.Reason(r.Reason))
	}
	switch {
	// What another node sends here is never sent on, nor translated.
	case r.From.Kind == maps.PlaceNode && (v.Reason == "drop_no_route" || v.Reason == "drop_no_service"),
		r.From.Kind == maps.PlaceWire && r.To.Kind == maps.PlaceNone && v.Reason == "":
		v.Verdict, v.Reason = "elsewhere", ""
	case r.Egress.Verdict == maps.VerdictDeny, r.Ingress.Verdict == maps.VerdictDeny:
		v.Verdict = "denied"
	case v.Reason != "":
		v.Verdict = "dropped"
	}
	if r.Service != 0 {
		if v.Service = a.n.serviceName(r.Service); v.Service == "" {
			v.Service = fmt.Sprintf("service id %d", r.Service)
		}
		if r.To.Kind != maps.PlaceNone {
			addr := maps.FromAddr(r.Dst)
			v.Backend, v.BackendPort = &askEnd{a.podAt(addr), addr}, r.Dport
		}
	}
	v.Partial = v.Verdict != "elsewhere" && v.Verdict != "dropped" &&
		(r.From.Kind == maps.PlaceNode || r.To.Kind == maps.PlaceNode)
	return v
}

func (a *asker) explain(v *askView, r maps.Ask) {
	dst := v.Destination
	if v.Backend != nil {
		dst = *v.Backend
	}
	from, to := r.From.Kind, r.To.Kind
	v.Egress = a.half(r.Egress, v.Source, "egress")
	v.Ingress = a.half(r.Ingress, dst, "ingress")
	if v.Verdict == "elsewhere" || v.Verdict == "dropped" {
		return
	}
	switch {
	case v.Egress.Asked:
	case from == maps.PlacePod:
		v.Egress.Text = "a pod always reaches itself"
	case from == maps.PlaceNode:
		v.Egress.Text = "not asked: decided on node " + v.From.Name
	case from == maps.PlaceHost && to == maps.PlacePod:
		v.Egress.Text = "this node always reaches its own pods"
	}
	if !v.Ingress.Asked && to == maps.PlaceNode {
		v.Ingress.Text = "not asked: decided on node " + v.To.Name
	}
}

func (a *asker) half(h maps.AskHalf, end askEnd, direction string) halfView {
	if h.Verdict == uint8(0) {
		return halfView{}
	}
	v := halfView{Asked: true, Table: h.Table &^ maps.TableDefault, Verdict: maps.VerdictName(h.Verdict), RuleID: h.Rule, Rule: a.n.rule(h.Rule)}
	if h.Table == 0 {
		v.Text = "not isolated"
		return v
	}
	v.Peer = &peerView{Identity: h.Identity, Description: a.n.identity(h.Identity)}
	policies := a.n.podPolicies(end.Name)
	if v.Policies = policies.IngressPolicies; direction == "egress" {
		v.Policies = policies.EgressPolicies
	}
	peer := "peer " + v.Peer.Description
	if v.Peer.Description != maps.IdentityName(h.Identity) {
		peer = fmt.Sprintf("peer %d (%s)", h.Identity, v.Peer.Description)
	}
	switch {
	case v.Rule == "" && h.Verdict == maps.VerdictAllow:
		v.Text = "allowed: no rule denies " + peer
	case v.Rule == "":
		v.Text = fmt.Sprintf("denied: %s, no rule allows %s", isolated(v.Policies), peer)
	case h.Verdict == maps.VerdictAllow:
		v.Text = fmt.Sprintf("allowed by %s for %s", v.Rule, peer)
	default:
		v.Text = fmt.Sprintf("denied by %s for %s", v.Rule, peer)
	}
	return v
}

func (v *askView) write(w io.Writer) {
	what := v.Protocol
	if v.Port != 0 {
		what += fmt.Sprintf(" %d", v.Port)
	}
	verdict := v.Verdict
	switch {
	case verdict == "elsewhere" && v.From.Kind == "node":
		verdict = "not decided on this node: the source is on node " + v.From.Name + ", ask there"
	case verdict == "elsewhere":
		verdict = "not decided on this node: neither end is here"
	case v.Reason != "":
		verdict += " (" + v.Reason + ")"
	case v.Partial:
		verdict += " by this node"
	}
	_, _ = fmt.Fprintf(w, "%v -> %v %s: %s\n", v.Source, v.Destination, what, verdict)
	if v.Backend != nil {
		_, _ = fmt.Fprintf(w, "  by %s to %v %s %d\n", v.Service, *v.Backend, v.Protocol, v.BackendPort)
	}
	if v.Egress.Text != "" {
		_, _ = fmt.Fprintf(w, "  egress:  %s\n", v.Egress.Text)
	}
	if v.Ingress.Text != "" {
		_, _ = fmt.Fprintf(w, "  ingress: %s\n", v.Ingress.Text)
	}
	if v.NotAsked > 0 {
		_, _ = fmt.Fprintf(w, "not asked: %d more backends of %s\n", v.NotAsked, v.Service)
	}
}

// end returns the addresses of --from or --to.
func (a *asker) end(flag, s string) ([]askEnd, error) {
	if addr, err := netip.ParseAddr(s); err == nil {
		addr = addr.Unmap().WithZone("")
		return []askEnd{{a.podAt(addr), addr}}, nil
	}
	if s == "host" {
		return a.host(flag)
	}
	for _, e := range a.n.endpoints {
		if podName(e.Namespace, e.Pod) == s {
			return ends(s, e.Addrs), nil
		}
	}
	pods, err := a.pods("name", s)
	switch down := (*agentDownError)(nil); {
	case errors.As(err, &down):
		return nil, fmt.Errorf("%s %s: names of pods need the agent, which does not answer, or --kubeconfig; give an address of the pod", flag, s)
	case err != nil:
		return nil, err
	case len(pods) == 0 && flag == "--to":
		if addrs, err := a.clusterIPs(s); err != nil || len(addrs) > 0 {
			return ends(s, addrs), err
		}
		return nil, fmt.Errorf("%s %s: there is no pod of this name, nor a service with a cluster IP in force ('podweir services' lists them)", flag, s)
	case len(pods) == 0:
		return nil, fmt.Errorf("%s %s: there is no such pod", flag, s)
	case len(pods[0].Addrs) == 0:
		return nil, fmt.Errorf("%s %s: the pod has no address yet", flag, s)
	}
	return ends(s, pods[0].Addrs), nil
}

// clusterIPs returns those in force of the Service that is called so, each
// once.
func (a *asker) clusterIPs(name string) ([]netip.Addr, error) {
	services, err := a.m.Services()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for k, v := range services {
		s, at := a.n.services[v.Id], addrPort(k.Addr, k.Port)
		if podName(s.Namespace, s.Name) == name && a.n.frontendType(v.Id, at, v.Flags) == "ClusterIP" {
			out = append(out, at.Addr())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

func ends(name string, addrs []netip.Addr) []askEnd {
	var out []askEnd
	for _, addr := range addrs {
		out = append(out, askEnd{name, addr})
	}
	return out
}

// host returns the addresses by which the cluster knows this node, the first
// of each family.
func (a *asker) host(flag string) ([]askEnd, error) {
	peers, err := a.m.Addrs()
	if err != nil {
		return nil, err
	}
	var own []netip.Addr
	for k, p := range peers {
		if p.Flags&maps.PeerInternal != 0 {
			own = append(own, maps.FromAddr(k))
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	own = slices.CompactFunc(own, func(a, b netip.Addr) bool { return a.Is4() == b.Is4() })
	if len(own) == 0 {
		return nil, fmt.Errorf("%s host: the addresses of this node are not known yet; give one", flag)
	}
	return ends("host", own), nil
}

// podAt names the pod that has an address; empty if there is none, or nobody
// who knows.
func (a *asker) podAt(addr netip.Addr) string {
	if name := a.n.pods[addr]; name != "" || a.n.down != nil {
		return name
	}
	pods, err := a.pods("addr", addr.String())
	if err != nil || len(pods) == 0 || pods[0].HostNetwork {
		return ""
	}
	return podName(pods[0].Namespace, pods[0].Name)
}

func (a *asker) pods(key, value string) ([]api.Pod, error) {
	if addrs, ok := a.n.everyPod[value]; ok && key == "name" {
		namespace, name := splitName(value)
		return []api.Pod{{Namespace: namespace, Name: name, Addrs: addrs}}, nil
	}
	if a.n.down != nil && a.n.everyPod != nil {
		return nil, nil
	}
	if a.n.down != nil {
		return nil, a.n.down
	}
	var pods api.Pods
	err := a.agent.Get(a.ctx, api.PathPods+"?"+url.Values{key: {value}}.Encode(), &pods)
	return pods.Pods, err
}
