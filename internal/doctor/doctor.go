package doctor

import (
	"context"
	"net/netip"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/firewall"
	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/oldcni"
)

// State of a finding.
type State string

const (
	OK   State = "ok"
	Warn State = "warn" // works, or may not
	Fail State = "fail" // does not work
)

// Finding is one thing that a check has found.
type Finding struct {
	Check  string `json:"check"`
	State  State  `json:"result"`
	Object string `json:"object,omitempty"`
	Text   string `json:"text"`
	WayOut string `json:"wayOut,omitempty"`
}

// Host is the node's kernel.
type Host interface {
	// Programs names our programs on a device's hooks.
	Programs(ifindex int) ([]string, error)
	// Pinned are the hooks that an agent attached to and pinned, by device;
	// for when none answers.
	Pinned() (map[int][]string, error)
	// Firewall reads the node's packet filters, with the programs that are
	// there; the errors are those of the rest.
	Firewall(ctx context.Context) (firewall.Ruleset, []error)
	// KubeProxy looks for what a kube-proxy has left; with an error it is
	// not all.
	KubeProxy(ctx context.Context) (kubeproxy.Leftovers, error)
	// OldCNI shows where another CNI plugin may have left something; with an
	// error it is not all.
	OldCNI() (oldcni.View, error)
	// Sysctl reads one, as a path below /proc/sys.
	Sysctl(name string) (string, error)
	// Devices are the MTUs of all devices.
	Devices() (map[string]int, error)
	// Route is the device that this host reaches an address by.
	Route(netip.Addr) (string, error)
	// AskDNS asks a resolver something, and wants any answer.
	AskDNS(context.Context, netip.AddrPort) error
}

// Facts are what checks look at.
type Facts struct {
	Status *api.Status // nil: the agent does not answer, AgentErr says why
	Agent  error
	// Endpoints and Services as the agent has them; nil without it.
	Endpoints *api.Endpoints
	Services  *api.Services
	// Plugged asks the agent whether a pod's interface is as it was made, at
	// both ends; nil without it.
	Plugged func(context.Context, api.Endpoint) error
	// Denials are what policy denied while somebody looked.
	Denials []api.Event
	// Missing are frontends that the agent has programmed and the datapath
	// does not have, by the object and port.
	Missing map[string][]netip.AddrPort
	Maps    error // why the pinned maps cannot be read
	Host    Host
}

// Check is one question.
type Check struct {
	Name string
	// Well is what is said when nothing is found.
	Well string
	Run  func(context.Context, Facts) []Finding
}

// Checks are all there are, in the order they are made: what comes first is
// the likelier cause.
func Checks() []Check {
	return []Check{
		{"agent", "answers and is ready", checkAgent},
		{"maps", "are pinned and can be read", checkMaps},
		{"programs", "are attached to every device that should have them", checkPrograms},
		{"sysctls", "are as forwarding needs them", checkSysctls},
		{"mtu", "what is sent fits the devices", checkMTU},
		{"firewall", "lets the tunnel's packets in", checkFirewall},
		{"qdiscs", "none is passed by", checkQdiscs},
		{"pods", "this host reaches those of this node, and they are plugged as they were", checkPods},
		{"policy", "nothing was heard of that it denied within a second", checkPolicy},
		{"services", "have endpoints, and the datapath has them", checkServices},
		{"dns", "the resolvers in kube-system answer, if there are any", checkDNS},
		{"leftovers", "nothing of kube-proxy's or of another CNI plugin is seen", checkLeftovers},
	}
}

// Run makes the checks.
func Run(ctx context.Context, f Facts, checks []Check) (out []Finding) {
	for _, c := range checks {
		found := c.Run(ctx, f)
		bad := false
		for i := range found {
			found[i].Check = c.Name
			bad = bad || found[i].State != OK
		}
		if !bad {
			out = append(out, Finding{Check: c.Name, State: OK, Text: c.Well})
		}
		out = append(out, found...)
	}
	return out
}

// Failed: is something broken?
func Failed(found []Finding) bool {
	for _, f := range found {
		if f.State == Fail {
			return true
		}
	}
	return false
}
