package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/internal/netfilter"
)

// How rules are kept.
const (
	NFTables       = netfilter.NFTables
	IPTablesNFT    = netfilter.IPTablesNFT
	IPTablesLegacy = netfilter.IPTablesLegacy
)

const ownTable = "kube-proxy"

// Device is the one that kube-proxy's IPVS mode puts the services' addresses on.
const Device = "kube-ipvs0"

// WayOut is what to do about leftovers.
const WayOut = "podweir-agent cleanup --kube-proxy on this node, or in the agent's pod, removes it; so do kube-proxy --cleanup and a reboot"

// Table has rules of kube-proxy's.
type Table struct {
	Kind   string // NFTables, IPTablesNFT, IPTablesLegacy
	Family string // ip, ip6
	Name   string
	Chains []string // kube-proxy's own, sorted; none of nftables, which are all its own
}

// String names the table, and one of the chains.
func (t Table) String() string {
	s := fmt.Sprintf("%s, table %s %s", t.Kind, t.Family, t.Name)
	if len(t.Chains) == 0 || t.Kind == NFTables {
		return s
	}
	// One that a reader knows, rather than a service's.
	name := t.Chains[0]
	for _, known := range []string{"KUBE-SERVICES", "KUBE-FORWARD"} {
		if slices.Contains(t.Chains, known) {
			name = known
			break
		}
	}
	return s + ", chain " + name
}

// whole says how many chains there are, too, which changes with services.
func (t Table) whole() string {
	if n := len(t.Chains) - 1; n > 0 {
		return fmt.Sprintf("%s and %d more", t, n)
	}
	return t.String()
}

// Leftovers of a kube-proxy.
type Leftovers struct {
	// Running says by what a kube-proxy is seen; empty: none is.
	Running string
	Tables  []Table
	Device  bool // kube-ipvs0 is there
}

// Any: is something left in the kernel?
func (l Leftovers) Any() bool { return len(l.Tables) > 0 || l.Device }

// Trouble is one thing that is there, and what it does.
type Trouble struct{ Object, Text, WayOut string }

// Troubles are what there is to say of the leftovers.
func (l Leftovers) Troubles() (out []Trouble) {
	if l.Running != "" {
		out = append(out, Trouble{"kube-proxy", "a kube-proxy runs on this node (" + l.Running + "): it goes on writing rules for services that podweir serves",
			"end it, and keep it from this node: kubectl -n kube-system delete daemonset kube-proxy"})
	}
	way := WayOut
	if l.Running != "" {
		way = "end kube-proxy first; then " + WayOut
	}
	for _, t := range l.Tables {
		out = append(out, Trouble{t.String(),
			"rules of kube-proxy are there: they translate what this host sends by UDP before podweir does, to endpoints of another time if none is at work", way})
	}
	if l.Device {
		out = append(out, Trouble{"Device " + Device,
			"kube-proxy's device of IPVS mode is there, with the services' addresses: this node takes them for its own", way})
	}
	return out
}

// Find looks for leftovers. What was found is right even with an error, which
// names what could not be read.
func Find(ctx context.Context) (l Leftovers, err error) {
	runtime.LockOSThread() // all of it is about one network namespace
	defer runtime.UnlockOSThread()
	var errs []error
	l.Running, err = running(ctx)
	errs = append(errs, err)
	tables, err := netfilter.Read()
	errs = append(errs, err)
	l.Tables = own(tables)
	l.Device, err = deviceThere()
	return l, errors.Join(append(errs, err)...)
}

// own are kube-proxy's own tables, and those of iptables with its chains.
func own(tables []netfilter.Table) (out []Table) {
	for _, t := range tables {
		if t.Kind == NFTables {
			if t.Name == ownTable && t.Family != "inet" {
				out = append(out, Table{t.Kind, t.Family, t.Name, nil})
			}
			continue
		}
		chains := slices.DeleteFunc(slices.Clone(t.Chains), func(c string) bool { return !OwnChain(c) })
		if len(chains) > 0 {
			out = append(out, Table{t.Kind, t.Family, t.Name, chains})
		}
	}
	return out
}

// deviceThere: nobody else gives a device that name.
func deviceThere() (bool, error) {
	_, err := netlink.LinkByName(Device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("device %s: %w", Device, err)
	}
	return true, nil
}
