package cluster

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// overflows counts the packets that found no room on this machine: in the
// queues of the processors, which every namespace and every test that runs
// shares, and in the UDP sockets of this cluster. What podweir drops is not
// among them, nor what a device cannot forward.
func (r Run) overflows() (uint64, error) {
	softnet, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		return 0, err
	}
	n, err := softnetDrops(softnet)
	if err != nil {
		return 0, err
	}
	spaces, err := filepath.Glob(filepath.Join(netnsDir, r.prefix()+"*"))
	if err != nil {
		return 0, err
	}
	for _, path := range spaces {
		counters, err := snmp(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // a pod that went
		case err != nil:
			return 0, err
		default:
			n += counters["Udp:RcvbufErrors"] + counters["Udp6RcvbufErrors"]
		}
	}
	return n, nil
}

// softnetDrops adds up what /proc/net/softnet_stat says was dropped for want of
// room: the second number of each processor's line.
func softnetDrops(data []byte) (n uint64, err error) {
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) < 2 {
			return 0, fmt.Errorf("softnet_stat: %q", s.Text())
		}
		dropped, err := strconv.ParseUint(f[1], 16, 64)
		if err != nil {
			return 0, fmt.Errorf("softnet_stat: %w", err)
		}
		n += dropped
	}
	return n, nil
}

// SNMP are the counters of the namespace's stack: "Udp:InDatagrams" of IPv4 and
// of what is common to both, "Udp6InDatagrams" of IPv6.
func (n *Netns) SNMP() (map[string]uint64, error) { return snmp(n.Path()) }

func snmp(netns string) (map[string]uint64, error) {
	out := map[string]uint64{}
	err := inNetns(netns, func() error {
		for _, file := range []string{"snmp", "snmp6", "netstat"} {
			data, err := os.ReadFile("/proc/thread-self/net/" + file)
			if err != nil {
				return err
			}
			parseSNMP(data, out)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("counters of %s: %w", netns, err)
	}
	return out, nil
}

// parseSNMP reads what /proc/net has in two formats: a line of names and one of
// values, or both on a line.
func parseSNMP(data []byte, out map[string]uint64) {
	var names []string
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) == 0 {
			continue
		}
		section, plain := strings.CutSuffix(f[0], ":")
		switch {
		case !plain:
			if len(f) == 2 {
				out[f[0]], _ = strconv.ParseUint(f[1], 10, 64)
			}
		case len(names) == len(f) && names[0] == f[0]:
			for i, v := range f[1:] {
				out[section+":"+names[i+1]], _ = strconv.ParseUint(v, 10, 64) // one is -1: no limit
			}
			names = nil
		default:
			names = f
		}
	}
}
