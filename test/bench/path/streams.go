package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podweir/podweir/test/bench/report"
	"github.com/podweir/podweir/test/cluster"
)

// Streams are iperf3's TCP over every mode, with offloads on and off: what is
// reported is throughput and retransmits, beside those of the kernel modes in
// the same run. It fails where somebody counted a wrong checksum, or podweir
// a drop.

// offload is a setting of every device that a packet crosses.
type offload struct {
	name     string
	features []string // of ethtool -K
}

func offloads() []offload {
	return []offload{
		{"all on", []string{"tx", "on", "rx", "on", "tso", "on", "gso", "on", "gro", "on"}},
		{"TSO, GSO off", []string{"tx", "on", "rx", "on", "tso", "off", "gso", "off", "gro", "on"}},
		{"GRO off", []string{"tx", "on", "rx", "on", "tso", "on", "gso", "on", "gro", "off"}},
		// Nobody leaves a checksum to a device: all are verified.
		{"all off", []string{"tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off"}},
	}
}

// A stream is one measurement.
type stream struct {
	Mode        string            `json:"mode"`
	Family      int               `json:"family"`
	Offload     string            `json:"offload"`
	Way         string            `json:"way"` // there, or back
	Gbits       float64           `json:"gbitsPerSecond"`
	Retransmits int               `json:"retransmits"`
	Bytes       float64           `json:"bytes"`
	Errors      map[string]uint64 `json:"checksumErrors,omitempty"`
	Drops       map[string]uint64 `json:"drops,omitempty"`
	Lost        map[string]uint64 `json:"lostByDevices,omitempty"` // full queues, say
}

type streams struct {
	Kernel  string    `json:"kernel"`
	CPUs    int       `json:"cpus"`
	Seconds int       `json:"seconds"`
	Time    time.Time `json:"time"`
	Rows    []stream  `json:"rows"`
}

func runStreams(ctx context.Context, o options, modes []mode) (err error) {
	if _, err := exec.LookPath("iperf3"); err != nil {
		return fmt.Errorf("%w: make bench-streams installs it", err)
	}
	all := &streams{Kernel: report.KernelRelease(), CPUs: runtime.NumCPU(), Seconds: o.streams, Time: time.Now().UTC()}
	b := &bench{o: o, tops: map[string]*topology{}}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, m := range modes {
		t := b.tops[m.topology]
		if t == nil {
			up, cancel := context.WithTimeout(ctx, bringUp)
			t, err = buildTopology(up, m)
			cancel()
			if t != nil {
				b.tops[m.topology] = t
			}
			if err != nil {
				return fmt.Errorf("%s: %w", m.topology, err)
			}
		}
		for _, off := range offloads() {
			if err := t.set(ctx, off); err != nil {
				return fmt.Errorf("%s: %w", m.topology, err)
			}
			for _, family := range []int{4, 6} {
				for _, back := range []bool{false, true} {
					s, err := t.stream(ctx, m, family, o.streams, back)
					if err != nil {
						return fmt.Errorf("%s, IPv%d, %s: %w", m.name, family, off.name, err)
					}
					s.Offload = off.name
					all.Rows = append(all.Rows, s)
				}
			}
		}
	}
	all.print(os.Stdout)
	if o.json != "" {
		err = report.WriteJSON(o.json, all)
	}
	return errors.Join(err, all.wrong())
}

// places are the namespaces of a topology, by name.
func (t *topology) places() map[string]*cluster.Netns {
	out := map[string]*cluster.Netns{}
	for name, p := range t.pods {
		out[name] = p.Netns
	}
	for _, n := range t.c.Nodes {
		out[n.NodeName] = n.Netns
	}
	return out
}

// links lists a namespace's devices, but lo.
func links(n *cluster.Netns) ([]netlink.Link, error) {
	h, ns, err := handle(n)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	defer h.Close()
	all, err := h.LinkList()
	return slices.DeleteFunc(all, func(l netlink.Link) bool { return l.Attrs().Name == "lo" }), err
}

func (t *topology) set(ctx context.Context, off offload) error {
	for where, n := range t.places() {
		all, err := links(n)
		if err != nil {
			return fmt.Errorf("%s: %w", where, err)
		}
		for _, l := range all {
			for i := 0; i < len(off.features); i += 2 {
				args := []string{"ethtool", "-K", l.Attrs().Name, off.features[i], off.features[i+1]}
				// A vxlan device has not all of them; what it lacks is off.
				if _, err := n.Exec(ctx, args...); err != nil && l.Type() != "vxlan" {
					return fmt.Errorf("%s: %w", where, err)
				}
			}
		}
	}
	return nil
}

// checksumErrors is what the stacks of all namespaces counted.
func (t *topology) checksumErrors() (map[string]uint64, error) {
	out := map[string]uint64{}
	for where, n := range t.places() {
		counters, err := n.SNMP()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		for name, value := range counters {
			if strings.HasSuffix(name, "CsumErrors") {
				out[where+" "+name] = value
			}
		}
	}
	return out, nil
}

// lost is what devices dropped: a veth whose other end's queue is full.
func (t *topology) lost() (map[string]uint64, error) {
	out := map[string]uint64{}
	for where, n := range t.places() {
		all, err := links(n)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		for _, l := range all {
			if s := l.Attrs().Statistics; s != nil {
				out[where+" "+l.Attrs().Name] = s.TxDropped + s.RxDropped + s.TxErrors + s.RxErrors
			}
		}
	}
	return out, nil
}

// grown is what a map's numbers grew by.
func grown(before, after map[string]uint64) map[string]uint64 {
	out := map[string]uint64{}
	for k, v := range after {
		if v > before[k] {
			out[k] = v - before[k]
		}
	}
	return out
}

// iperf is what is read of iperf3's report.
type iperf struct {
	Error string `json:"error"`
	End   struct {
		Sent struct {
			Retransmits int `json:"retransmits"`
		} `json:"sum_sent"`
		Received struct {
			Bytes float64 `json:"bytes"`
			Bits  float64 `json:"bits_per_second"`
		} `json:"sum_received"`
	} `json:"end"`
}

func (t *topology) stream(ctx context.Context, m mode, family, seconds int, back bool) (stream, error) {
	s := stream{Mode: m.name, Family: family, Way: "there"}
	target, port := t.target(m, family)
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second+time.Minute)
	defer cancel()
	server, err := t.pods[m.server].Start(ctx, "iperf3", "--server", "--one-off", "--forceflush", "--port", strconv.Itoa(listenPort))
	if err != nil {
		return s, err
	}
	for line := ""; !strings.Contains(line, "listening"); {
		if line, err = server.Line(ctx); err != nil {
			return s, fmt.Errorf("iperf3's server: %w", err)
		}
	}
	counted, err := t.counters()
	if err != nil {
		return s, err
	}
	sums, err := t.checksumErrors()
	if err != nil {
		return s, err
	}
	lost, err := t.lost()
	if err != nil {
		return s, err
	}
	args := []string{"iperf3", "--client", target.String(), "--port", strconv.Itoa(port), "--time", strconv.Itoa(seconds), "--json"}
	if back {
		s.Way = "back"
		args = append(args, "--reverse")
	}
	out, err := t.pods["client"].Exec(ctx, args...)
	var r iperf
	if jerr := json.Unmarshal([]byte(out), &r); jerr != nil || r.Error != "" || err != nil {
		return s, fmt.Errorf("iperf3 to %s: %w", netip.AddrPortFrom(target, uint16(port)), errors.Join(err, jerr, errors.New(r.Error)))
	}
	s.Gbits, s.Bytes, s.Retransmits = r.End.Received.Bits/1e9, r.End.Received.Bytes, r.End.Sent.Retransmits
	after, err := t.checksumErrors()
	if err != nil {
		return s, err
	}
	s.Errors = grown(sums, after)
	lostNow, err := t.lost()
	if err != nil {
		return s, err
	}
	s.Lost = grown(lost, lostNow)
	now, err := t.counters()
	if err != nil {
		return s, err
	}
	s.Drops = map[string]uint64{}
	for k, n := range now.since(counted) {
		if strings.HasPrefix(k.reason, "drop_") && k.reason != "drop_multicast" {
			s.Drops[k.node+" "+k.hook+" "+k.reason] += n
		}
	}
	return s, nil
}

// wrong is an error that names every wrong checksum and every drop.
func (all *streams) wrong() error {
	var errs []error
	for _, s := range all.Rows {
		if len(s.Errors) > 0 || len(s.Drops) > 0 {
			errs = append(errs, fmt.Errorf("%s, IPv%d, %s, %s: checksum errors %v, drops %v", s.Mode, s.Family, s.Offload, s.Way, s.Errors, s.Drops))
		}
	}
	return errors.Join(errs...)
}

func (all *streams) print(out io.Writer) {
	fmt.Fprintf(out, "iperf3, one stream, %d s each, kernel %s, %d CPUs: Gbit/s, retransmits per GB (packets lost by devices)\n\n", all.Seconds, all.Kernel, all.CPUs)
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	var columns []string
	var rows []string
	cells := map[[2]string]string{}
	for _, s := range all.Rows {
		row := fmt.Sprintf("%s\tIPv%d", s.Mode, s.Family)
		column := s.Offload + ", " + s.Way
		if !slices.Contains(columns, column) {
			columns = append(columns, column)
		}
		if !slices.Contains(rows, row) {
			rows = append(rows, row)
		}
		lost := uint64(0)
		for _, n := range s.Lost {
			lost += n
		}
		cells[[2]string{row, column}] = fmt.Sprintf("%.1f  %.0f (%d)", s.Gbits, float64(s.Retransmits)/max(s.Bytes/1e9, 1e-9), lost)
	}
	fmt.Fprintln(t, "\t\t"+strings.Join(columns, "\t"))
	for _, row := range rows {
		fmt.Fprint(t, row)
		for _, column := range columns {
			fmt.Fprint(t, "\t", cells[[2]string{row, column}])
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush()
	sums := 0
	for _, s := range all.Rows {
		sums += len(s.Errors)
	}
	fmt.Fprintf(out, "\n%d streams, %d of them with a wrong checksum\n", len(all.Rows), sums)
}
