package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/podweir/podweir/internal/firewall"
	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/oldcni"
)

// OSHost is the machine; bpffs is where the agent pins.
func OSHost(bpffs string) Host { return osHost{bpffs} }

type osHost struct{ bpffs string }

func (h osHost) Programs(ifindex int) ([]string, error) { return loader.Programs(ifindex) }

func (h osHost) Pinned() (map[int][]string, error) { return loader.Pinned(h.bpffs) }

func (h osHost) KubeProxy(ctx context.Context) (kubeproxy.Leftovers, error) {
	return kubeproxy.Find(ctx)
}

func (h osHost) OldCNI() (oldcni.View, error) { return oldcni.Look() }

func (h osHost) Sysctl(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	return strings.TrimSpace(string(b)), err
}

func (h osHost) Devices() (map[string]int, error) {
	list, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	out := make(map[string]int, len(list))
	for _, d := range list {
		out[d.Name] = d.MTU
	}
	return out, nil
}

// Firewall reads both kinds of iptables and nft, as far as they are there. The
// tables that iptables keeps in nft are read from iptables alone.
func (h osHost) Firewall(ctx context.Context) (firewall.Ruleset, []error) {
	var set firewall.Ruleset
	var errs []error
	kept := make(map[string]bool) // families that iptables-nft has
	for _, s := range []struct{ program, family string }{
		{"iptables-legacy", "ip"}, {"ip6tables-legacy", "ip6"}, {"iptables-nft", "ip"}, {"ip6tables-nft", "ip6"},
	} {
		out, err := output(ctx, s.program+"-save")
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		rules, err := firewall.IPTables(s.program, s.family, string(out))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		set.Add(rules)
		// What iptables cannot read it says so of, and leaves out.
		if strings.HasSuffix(s.program, "-nft") && !bytes.Contains(out, []byte("incompatible")) {
			kept[s.family] = true
		}
	}
	out, err := output(ctx, "nft", "-j", "list", "ruleset")
	if errors.Is(err, exec.ErrNotFound) {
		if len(kept) == 0 {
			errs = append(errs, errors.New("neither nft nor iptables-nft is there: rules of nf_tables are not seen; install one of them, or run this command where it is"))
		}
		return set, errs
	}
	if err == nil && len(bytes.TrimSpace(out)) > 0 {
		var rules firewall.Ruleset
		rules, err = firewall.NFT(out, func(family, table string) bool {
			switch table {
			case "raw", "mangle", "nat", "filter", "security":
				return kept[family]
			}
			return false
		})
		set.Add(rules)
	}
	if err != nil {
		errs = append(errs, err)
	}
	return set, errs
}

func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return nil, err
		}
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.Bytes(), nil
}
