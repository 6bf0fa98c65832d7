package sourceport

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

const (
	first = 1024
	last  = 65535
	// Enough is how many ports there have to be: the NodePorts and what the
	// host takes for itself may not leave fewer.
	Enough = 1024
	// Fewest is how many may be named by hand: with fewer, a handful of
	// connections to one place would have all of them.
	Fewest = 256
	// Max is how many ranges the datapath knows (PW_PORT_RANGES).
	Max = 4
)

// Range is a range of ports, both ends included; the zero Range has none.
type Range struct{ Min, Max uint16 }

func (r Range) String() string {
	if r.Min == r.Max {
		return strconv.Itoa(int(r.Min))
	}
	return fmt.Sprintf("%d-%d", r.Min, r.Max)
}

// Len is how many ports are in the range.
func (r Range) Len() int {
	if r.Min == 0 {
		return 0
	}
	return int(r.Max) - int(r.Min) + 1
}

// Count is how many ports are in ranges that do not overlap.
func Count(list []Range) (n int) {
	for _, r := range list {
		n += r.Len()
	}
	return n
}

// Parse reads ranges such as 1024-29999 or 61000, which it returns in order.
func Parse(list []string) ([]Range, error) {
	var out []Range
	for _, s := range list {
		low, high, isRange := strings.Cut(strings.TrimSpace(s), "-")
		if !isRange {
			high = low
		}
		from, err1 := strconv.ParseUint(low, 10, 16)
		to, err2 := strconv.ParseUint(high, 10, 16)
		if err1 != nil || err2 != nil || from == 0 || to < from {
			return nil, fmt.Errorf("%q is no range of ports such as 1024-29999", s)
		}
		out = append(out, Range{uint16(from), uint16(to)})
	}
	slices.SortFunc(out, func(a, b Range) int { return cmp.Compare(a.Min, b.Min) })
	for i := 1; i < len(out); i++ {
		if out[i].Min <= out[i-1].Max {
			return nil, fmt.Errorf("%v and %v overlap", out[i-1], out[i])
		}
	}
	if len(out) > Max {
		return nil, fmt.Errorf("%d ranges are given, at most %d can be", len(out), Max)
	}
	return out, nil
}

// Check refuses ports, as they are named by hand, that are the node's own below
// 1024, that are fewer than [Fewest], or that NodePorts may have: unless these
// leave fewer than [Enough], when there is no way but to share. None are none.
func Check(ports []Range, nodePorts Range) error {
	if len(ports) == 0 {
		return nil
	}
	for _, r := range ports {
		if r.Min < first {
			return fmt.Errorf("%v has ports below %d, which are for the node's own services: begin at %d", r, first, first)
		}
	}
	if n := Count(ports); n < Fewest {
		return fmt.Errorf("these are %d ports, at least %d are needed: there are no more connections to one place than ports", n, Fewest)
	}
	beside := without([]Range{{first, last}}, nodePorts)
	if Count(beside) < Enough {
		return nil
	}
	for _, r := range ports {
		if r.overlaps(nodePorts) {
			return fmt.Errorf("%v overlaps the range of NodePorts %v: leave those out, or narrow --service-node-port-range", r, nodePorts)
		}
	}
	return nil
}

// CheckLocal says which ports, as they are named by hand, the host takes for
// itself, too. That is safe, because whoever comes second is given another port,
// and the range is each host's own and may change: a reason to tell, not to
// refuse.
func CheckLocal(ports []Range, local Range) error {
	for _, r := range ports {
		if r.overlaps(local) {
			return fmt.Errorf("--source-ports %v overlaps net.ipv4.ip_local_port_range %v, of which the host takes ports for its own connections: leave those out, or narrow the sysctl", r, local)
		}
	}
	return nil
}

func (r Range) overlaps(o Range) bool {
	return r.Len() > 0 && o.Len() > 0 && r.Min <= o.Max && o.Min <= r.Max
}

// Choose returns all ports from 1024 on that are in neither range. Should the
// two leave fewer than [Enough], the host's own are not spared: that is said in
// shortage, and is safe, because whoever comes second is given another port.
// Without enough ports beside the NodePorts there is an error.
func Choose(nodePorts, local Range) (ports []Range, shortage, err error) {
	beside := without([]Range{{first, last}}, nodePorts)
	if n := Count(beside); n < Enough {
		return nil, nil, fmt.Errorf("the range of NodePorts %v leaves %d of the ports %d-%d to translate sources to: %d are needed", nodePorts, n, first, last, Enough)
	}
	ports = without(beside, local)
	if n := Count(ports); n < Enough {
		return beside, fmt.Errorf("net.ipv4.ip_local_port_range %v and the NodePorts %v leave %d ports to translate sources to, %d are needed: the host's own are taken, too; narrow the sysctl, or name ports with --source-ports", local, nodePorts, n, Enough), nil
	}
	return ports, nil, nil
}

// without cuts a range out of others.
func without(list []Range, cut Range) (out []Range) {
	if cut.Len() == 0 {
		return list
	}
	for _, r := range list {
		if cut.Max < r.Min || cut.Min > r.Max {
			out = append(out, r)
			continue
		}
		if cut.Min > r.Min {
			out = append(out, Range{r.Min, cut.Min - 1})
		}
		if cut.Max < r.Max {
			out = append(out, Range{cut.Max + 1, r.Max})
		}
	}
	return out
}
