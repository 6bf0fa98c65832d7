package cli

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// nodeView is a node that the tunnel leads to.
type nodeView struct {
	ID       uint32         `json:"id"`
	Name     string         `json:"name,omitempty"`
	Addr     netip.Addr     `json:"addr"`
	MAC      string         `json:"mac,omitempty"`
	PodCIDRs []netip.Prefix `json:"podCIDRs"`
	// Pods is the number of pod addresses known to be there.
	Pods int `json:"pods"`
	// Accepted: packets from its address are taken from the tunnel.
	Accepted bool `json:"accepted"`
	Self     bool `json:"self,omitempty"`
}

func (s *session) nodesCommand() *cobra.Command {
	return s.kubeconfigFlag(&cobra.Command{
		Use:   "nodes",
		Short: "List the nodes that the tunnel leads to",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withMaps(func(m Maps) error {
				n, err := s.namesFor(cmd.Context(), m, api.PathStatus)
				if err != nil {
					return err
				}
				nodes, err := readNodes(m, n)
				if err != nil {
					return err
				}
				return s.print(struct {
					Nodes []nodeView `json:"nodes"`
				}{nodes}, nodeTable(nodes, s.wide()))
			})
		},
	})
}

func nodeTable(nodes []nodeView, wide bool) *table {
	t := newTable("no other nodes", "ID", "NODE", "ADDRESS", "MAC", "POD CIDRS", "POD ADDRESSES", "TUNNEL")
	for _, v := range nodes {
		id, tunnel, addr := fmt.Sprint(v.ID), "ok", ""
		if v.Addr.IsValid() {
			addr = v.Addr.String()
		}
		switch {
		case v.Self:
			id, tunnel = "", "this node"
		case v.ID == 0:
			id, tunnel = "", "not in the datapath: unreachable"
		case !v.Accepted:
			tunnel = "its packets are not accepted"
		}
		t.add(id, v.Name, addr, v.MAC, list(texts(v.PodCIDRs), wide), fmt.Sprint(v.Pods), tunnel)
	}
	return t
}

func readNodes(m Maps, n *names) ([]nodeView, error) {
	nodes, err := m.Nodes()
	if err != nil {
		return nil, err
	}
	ids, err := m.NodeIDs()
	if err != nil {
		return nil, err
	}
	prefixes, err := m.Prefixes()
	if err != nil {
		return nil, err
	}
	addrs, err := m.Addrs()
	if err != nil {
		return nil, err
	}
	// This node is id 0 here: local pods and ranges lead to no node.
	pods, cidrs := map[uint32]int{}, map[uint32][]netip.Prefix{}
	for _, p := range addrs {
		if p.Flags&maps.PeerPod != 0 && (p.Node != 0 || p.Flags&maps.PeerLocal != 0) {
			pods[p.Node]++
		}
	}
	for k, p := range prefixes {
		if p.Flags&maps.PeerPod != 0 && (p.Node != 0 || p.Flags&maps.PeerLocal != 0) {
			cidrs[p.Node] = append(cidrs[p.Node], maps.FromPrefix(k))
		}
	}
	for _, c := range cidrs {
		slices.SortFunc(c, comparePrefix)
	}
	out := []nodeView{}
	listed := map[string]bool{}
	for id, node := range nodes {
		v := nodeView{
			ID: id, Name: n.nodes[id], Addr: maps.FromAddr(node.Addr), MAC: net.HardwareAddr(node.Mac[:]).String(),
			PodCIDRs: cidrs[id], Pods: pods[id], Accepted: ids[node.Addr] == id,
		}
		listed[v.Name] = true
		out = append(out, v)
	}
	for _, node := range n.status.Nodes {
		switch {
		case node.Self:
			out = append(out, nodeView{Name: node.Name, Addr: node.Addr, PodCIDRs: cidrs[0], Pods: pods[0], Self: true, MAC: n.status.Tunnel.MAC})
		case !listed[node.Name]:
			out = append(out, nodeView{Name: node.Name, Addr: node.Addr, PodCIDRs: node.PodCIDRs})
		}
	}
	slices.SortFunc(out, func(a, b nodeView) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return out, nil
}

func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}
