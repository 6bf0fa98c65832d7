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

// endpointView is a pod of this node.
type endpointView struct {
	ID          uint32       `json:"id"`
	Pod         string       `json:"pod,omitempty"` // namespace/name
	UID         string       `json:"uid,omitempty"`
	ContainerID string       `json:"containerID,omitempty"`
	Addrs       []netip.Addr `json:"addrs"`
	Device      string       `json:"device"`
	Ifindex     uint32       `json:"ifindex"`
	MAC         string       `json:"mac"`
	Identity    uint32       `json:"identity"`
	// Ingress and Egress are policy tables; 0 = not isolated.
	Ingress uint32 `json:"ingress"`
	Egress  uint32 `json:"egress"`
	// HostPorts are the ports of the node that lead to it.
	HostPorts []string `json:"hostPorts,omitempty"`
	// Missing: the agent knows it, and it is not in the datapath.
	Missing bool `json:"missing,omitempty"`
}

func (s *session) endpointsCommand() *cobra.Command {
	return s.kubeconfigFlag(&cobra.Command{
		Use:   "endpoints",
		Short: "List the pods of this node",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withMaps(func(m Maps) error {
				n, err := s.namesFor(cmd.Context(), m, api.PathEndpoints)
				if err != nil {
					return err
				}
				eps, err := readEndpoints(m, n)
				if err != nil {
					return err
				}
				return s.print(struct {
					Endpoints []endpointView `json:"endpoints"`
				}{eps}, endpointTable(eps))
			})
		},
	})
}

func endpointTable(eps []endpointView) *table {
	t := newTable("no pods on this node", "ID", "POD", "ADDRESSES", "DEVICE", "MAC", "IDENTITY", "INGRESS", "EGRESS", "HOST PORTS", "+CONTAINER")
	for _, e := range eps {
		ingress, egress := isolation(e.Ingress), isolation(e.Egress)
		identity := maps.IdentityName(e.Identity)
		if e.Missing {
			ingress, egress, identity = "not in the datapath", "", ""
		}
		t.add(fmt.Sprint(e.ID), e.Pod, list(texts(e.Addrs), true), e.Device, e.MAC, identity, ingress, egress, list(e.HostPorts, true), e.ContainerID)
	}
	return t
}

// isolation prints a policy table of a pod.
func isolation(table uint32) string {
	if table == 0 {
		return "open"
	}
	return fmt.Sprintf("table %d", table)
}

// readEndpoints returns the pods in the map, and those that only the agent
// knows, sorted by name, then address.
func readEndpoints(m Maps, n *names) ([]endpointView, error) {
	endpoints, err := m.Endpoints()
	if err != nil {
		return nil, err
	}
	known := map[uint32]api.Endpoint{}
	for _, e := range n.endpoints {
		known[e.ID] = e
	}
	// The addresses of a pod share everything but their policy slot; if they
	// do not, each stands for itself.
	type ref struct{ id, ifindex, in, out, identity uint32 }
	views := map[ref]*endpointView{}
	present := map[uint32]bool{}
	for a, e := range endpoints {
		r := ref{e.Id, e.Ifindex, e.PolicyIn, e.PolicyOut, e.Identity}
		present[e.Id] = true
		if views[r] == nil {
			v := &endpointView{
				ID: e.Id, Device: n.device(e.Ifindex), Ifindex: e.Ifindex, MAC: net.HardwareAddr(e.Mac[:]).String(),
				Identity: e.Identity, Ingress: e.PolicyIn, Egress: e.PolicyOut,
			}
			if k, ok := known[e.Id]; ok {
				v.Pod, v.UID, v.ContainerID = podName(k.Namespace, k.Pod), k.UID, k.ContainerID
				v.HostPorts = k.HostPorts
			}
			views[r] = v
		}
		views[r].Addrs = append(views[r].Addrs, maps.FromAddr(a))
	}
	out := []endpointView{}
	for _, v := range views {
		slices.SortFunc(v.Addrs, netip.Addr.Compare)
		out = append(out, *v)
	}
	for _, k := range known {
		if !present[k.ID] {
			out = append(out, endpointView{
				ID: k.ID, Pod: podName(k.Namespace, k.Pod), UID: k.UID, ContainerID: k.ContainerID,
				Addrs: k.Addrs, Device: k.HostIfName, Ifindex: uint32(k.HostIfindex), MAC: k.MAC, HostPorts: k.HostPorts, Missing: true,
			})
		}
	}
	slices.SortFunc(out, func(a, b endpointView) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), slices.CompareFunc(a.Addrs, b.Addrs, netip.Addr.Compare),
			cmp.Compare(a.ID, b.ID))
	})
	return out, nil
}

func texts[T fmt.Stringer](items []T) []string {
	out := make([]string, len(items))
	for i, x := range items {
		out[i] = x.String()
	}
	return out
}
