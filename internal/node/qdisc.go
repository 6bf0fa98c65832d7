package node

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Qdisc is what other programs have put on a pod's host-side device to shape,
// filter or mirror its packets. Empty = nothing.
type Qdisc struct {
	// Out is about what is sent to the pod: "tbf", or "filters".
	Out string
	// In is about what the pod sends: "filters".
	In string
}

// ourFilter is how the names of our own filters begin, on kernels where the
// programs are such.
const ourFilter = "podweir_"

// Qdiscs are those of pods' devices that have any, by the device's index.
func (m *Manager) Qdiscs() (map[int]Qdisc, error) {
	links, err := m.nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	pods := make(map[int]netlink.Link)
	for _, l := range links {
		if IsHostVeth(l.Attrs().Name) {
			pods[l.Attrs().Index] = l
		}
	}
	out := make(map[int]Qdisc)
	if len(pods) == 0 {
		return out, nil
	}
	list, err := m.nl.QdiscList(nil)
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	for _, q := range list {
		a := q.Attrs()
		link := pods[a.LinkIndex]
		if link == nil {
			continue
		}
		d := out[a.LinkIndex]
		switch kind := q.Type(); {
		case kind == "ingress":
			if m.filtered(link, a.Handle) {
				d.In = "filters"
			}
		case kind == "clsact":
			if m.filtered(link, netlink.HANDLE_MIN_INGRESS) {
				d.In = "filters"
			}
			if d.Out == "" && m.filtered(link, netlink.HANDLE_MIN_EGRESS) {
				d.Out = "filters"
			}
		case a.Parent == netlink.HANDLE_ROOT && kind != "noqueue" && kind != "noop":
			d.Out = kind
		}
		if d != (Qdisc{}) {
			out[a.LinkIndex] = d
		}
	}
	return out, nil
}

// filtered: there are filters that are not ours. What cannot be read is none
// of ours.
func (m *Manager) filtered(link netlink.Link, parent uint32) bool {
	filters, err := m.nl.FilterList(link, parent)
	if err != nil {
		return !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL)
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); !ok || !strings.HasPrefix(b.Name, ourFilter) {
			return true
		}
	}
	return false
}
