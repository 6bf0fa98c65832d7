package kubeproxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/firewall"
	"github.com/podweir/podweir/internal/netfilter"
)

// Remove removes what a kube-proxy left, and says what that was. It refuses
// while one runs. What cannot be removed is in the error and stops nothing
// else; a second call goes on with it.
func Remove(ctx context.Context) (removed []string, err error) {
	runtime.LockOSThread() // all of it is about one network namespace
	defer runtime.UnlockOSThread()
	l, err := Find(ctx)
	if l.Running != "" {
		return nil, fmt.Errorf("a kube-proxy runs on this node (%s) and would make its rules anew: end it first (kubectl -n kube-system delete daemonset kube-proxy)", l.Running)
	}
	errs := []error{err}
	for _, t := range l.Tables {
		if err := t.remove(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", t, err))
			continue
		}
		removed = append(removed, t.whole())
	}
	if l.Device {
		if err := netlink.LinkDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device}}); err != nil {
			errs = append(errs, fmt.Errorf("device %s: %w", Device, err))
		} else {
			removed = append(removed, "device "+Device+" (the table of IPVS stays: ipvsadm --clear empties it)")
		}
	}
	return removed, errors.Join(errs...)
}

func (t Table) remove(ctx context.Context) error {
	switch t.Kind {
	case NFTables:
		table := nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(t.Name))
		return commit([]nftChange{{unix.NFT_MSG_DELTABLE, netfilter.Family(t.Family), []*nl.RtAttr{table}}})
	case IPTablesNFT:
		return t.removeChains()
	}
	return t.removeLegacy(ctx)
}

// batchSize is how many changes go to the kernel at once: all fit a socket's
// buffer.
const batchSize = 256

// removeChains removes kube-proxy's chains from a table of iptables: first what
// leads to them from others, so that none of them is half at work, then what is
// in them, for they lead to each other, then them.
func (t Table) removeChains() error {
	family := netfilter.Family(t.Family)
	tables, err := netfilter.ReadNFT()
	if err != nil {
		return err
	}
	rules, err := netfilter.ReadRules(t.Family, t.Name)
	if err != nil {
		return err
	}
	var chains []string
	for _, o := range tables {
		if o.Kind == t.Kind && o.Family == t.Family && o.Name == t.Name {
			chains = slices.DeleteFunc(slices.Clone(o.Chains), func(c string) bool { return !removable(c) })
		}
	}
	var changes []nftChange
	table := func(kind int) *nl.RtAttr { return nl.NewRtAttr(kind, nl.ZeroTerminated(t.Name)) }
	for _, r := range rules {
		if !removable(r.Chain) && slices.ContainsFunc(r.Leads, removable) {
			changes = append(changes, nftChange{unix.NFT_MSG_DELRULE, family, []*nl.RtAttr{
				table(unix.NFTA_RULE_TABLE), nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(r.Chain)), nl.NewRtAttr(unix.NFTA_RULE_HANDLE, r.Handle),
			}})
		}
	}
	for _, c := range chains {
		changes = append(changes, nftChange{unix.NFT_MSG_DELRULE, family, []*nl.RtAttr{
			table(unix.NFTA_RULE_TABLE), nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(c)),
		}})
	}
	for _, c := range chains {
		changes = append(changes, nftChange{unix.NFT_MSG_DELCHAIN, family, []*nl.RtAttr{
			table(unix.NFTA_CHAIN_TABLE), nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(c)),
		}})
	}
	for part := range slices.Chunk(changes, batchSize) {
		if err := commit(part); err != nil {
			return fmt.Errorf("%w; did something change it at the same time? Then try again", err)
		}
	}
	return nil
}

// nftChange is one message of a batch.
type nftChange struct {
	message int
	family  uint8
	attrs   []*nl.RtAttr
}

// commit has the kernel make all the changes, or none.
func commit(changes []nftChange) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("socket to nf_tables: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
		return fmt.Errorf("socket to nf_tables: %w", err)
	}
	var out []byte
	seq := uint32(0)
	add := func(kind, flags int, family uint8, resource uint16, attrs []*nl.RtAttr) {
		r := nl.NewNetlinkRequest(kind, flags)
		r.Seq = seq
		seq++
		r.AddData(&nl.Nfgenmsg{NfgenFamily: family, ResId: nl.Swap16(resource)})
		for _, a := range attrs {
			r.AddData(a)
		}
		out = append(out, r.Serialize()...)
	}
	add(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.NFPROTO_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil)
	for i, c := range changes {
		flags := 0
		if i == len(changes)-1 {
			flags = unix.NLM_F_ACK
		}
		add(unix.NFNL_SUBSYS_NFTABLES<<8|c.message, flags, c.family, 0, c.attrs)
	}
	last := seq - 1
	add(unix.NFNL_MSG_BATCH_END, 0, unix.NFPROTO_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil)
	if err := unix.Sendto(fd, out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("change nf_tables: %w", err)
	}
	return answer(fd, last)
}

// answer waits for the kernel's word on the message with that number: an error
// of one before it comes first, and is the batch's.
func answer(fd int, last uint32) error {
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("answer of nf_tables: %w", err)
		}
		for b := buf[:n]; len(b) >= unix.SizeofNlMsghdr+4; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < unix.SizeofNlMsghdr+4 || size > len(b) {
				return errors.New("answer of nf_tables: cut off")
			}
			if binary.NativeEndian.Uint16(b[4:]) == unix.NLMSG_ERROR {
				if errno := -int32(binary.NativeEndian.Uint32(b[unix.SizeofNlMsghdr:])); errno != 0 {
					return fmt.Errorf("change nf_tables: %w", unix.Errno(errno))
				}
				if binary.NativeEndian.Uint32(b[8:]) == last {
					return nil
				}
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

// removeLegacy has the node's own programs do it.
func (t Table) removeLegacy(ctx context.Context) error {
	base := "iptables"
	if t.Family == "ip6" {
		base = "ip6tables"
	}
	program, err := legacyProgram(ctx, base)
	if err != nil {
		return err
	}
	saved, err := run(ctx, "", program+"-save", "-t", t.Name)
	if err != nil {
		return err
	}
	_, err = run(ctx, legacyScript(t.Name, saved), program+"-restore", "--noflush", "-w", "30")
	return err
}

// legacyProgram is the name of the iptables here that works on legacy tables.
func legacyProgram(ctx context.Context, base string) (string, error) {
	if _, err := exec.LookPath(base + "-legacy-restore"); err == nil {
		return base + "-legacy", nil
	}
	if _, err := exec.LookPath(base + "-restore"); err == nil {
		if out, err := run(ctx, "", base, "-V"); err == nil && !strings.Contains(out, "nf_tables") {
			return base, nil
		}
	}
	return "", fmt.Errorf("rules of legacy iptables are removed by %s-legacy-save and -restore, which are not here: run this on the node itself with them installed, or kube-proxy --cleanup from its image, or reboot the node", base)
}

// legacyScript is what iptables-restore has to do, with what iptables-save said:
// nothing but delete, so that others' rules and their counters stay.
func legacyScript(table, saved string) string {
	var jumps, flushes, deletes strings.Builder
	for line := range strings.Lines(saved) {
		line = strings.TrimRight(line, "\r\n")
		if name, ok := strings.CutPrefix(line, ":"); ok {
			if name, _, _ = strings.Cut(name, " "); removable(name) {
				fmt.Fprintf(&flushes, "-F %s\n", name)
				fmt.Fprintf(&deletes, "-X %s\n", name)
			}
		}
		rule, ok := strings.CutPrefix(line, "-A ")
		if !ok {
			continue
		}
		w := firewall.Words(rule)
		if len(w) == 0 || removable(w[0]) {
			continue
		}
		if i := slices.IndexFunc(w, func(s string) bool { return s == "-j" || s == "-g" }); i >= 0 && i+1 < len(w) && removable(w[i+1]) {
			jumps.WriteString("-D " + rule + "\n")
		}
	}
	return "*" + table + "\n" + jumps.String() + flushes.String() + deletes.String() + "COMMIT\n"
}

func run(ctx context.Context, input, name string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
