package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/podweir/podweir/internal/sourceport"
	"github.com/podweir/podweir/internal/wholefile"
)

// sysctlState is the record of node-wide sysctls that we changed.
type sysctlState struct {
	file    string
	Changed map[string]change `json:"changed"`
}

type change struct {
	Old string `json:"old"`
	New string `json:"new"`
}

func (s *sysctlState) open(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	s.file = filepath.Join(dir, "sysctls.json")
	data, err := os.ReadFile(s.file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("record of changed sysctls: %w", err)
	default:
		if err := json.Unmarshal(data, s); err != nil {
			return fmt.Errorf("record of changed sysctls: %s: %w; remove the file to start a new one (the old values are then not restored)", s.file, err)
		}
	}
	if s.Changed == nil {
		s.Changed = make(map[string]change)
	}
	return nil
}

// save replaces the record whole, so that no crash leaves half of one.
func (s *sysctlState) save() error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := wholefile.Write(s.file, wholefile.How{Mode: 0o600, Durable: true}, wholefile.Bytes(append(data, '\n'))); err != nil {
		return fmt.Errorf("record of changed sysctls: %w", err)
	}
	return nil
}

func (m *Manager) readSysctl(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(m.proc, name))
	return strings.TrimSpace(string(b)), err
}

func (m *Manager) writeSysctl(name, value string) error {
	// O_TRUNC makes some kernels' handlers see two writes; plain O_WRONLY.
	f, err := os.OpenFile(filepath.Join(m.proc, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// ourSysctl sets a value of one of our own devices, or one whose device has
// just gone, which is no error.
func (m *Manager) ourSysctl(name, value string) error {
	have, err := m.readSysctl(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && have != value {
		err = m.writeSysctl(name, value)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("sysctl %s = %s: %w", name, value, err)
	}
	return nil
}

// nodeSysctl sets a node-wide value and records the one it had. The record
// comes first: a crash in between leaves a record that restores nothing.
func (m *Manager) nodeSysctl(name, value string) (changed bool, err error) {
	have, err := m.readSysctl(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // no IPv6 in this kernel, or the device has gone
	}
	if err != nil {
		return false, fmt.Errorf("sysctl %s: %w", name, err)
	}
	if have == value {
		return false, nil
	}
	if _, known := m.state.Changed[name]; !known {
		m.state.Changed[name] = change{Old: have, New: value}
		if err := m.state.save(); err != nil {
			delete(m.state.Changed, name)
			return false, fmt.Errorf("sysctl %s left at %s: %w", name, have, err)
		}
	} else {
		m.log.Warn("a sysctl was reset by another program; setting it again",
			"sysctl", strings.ReplaceAll(name, "/", "."), "found", have, "set", value)
	}
	if err := m.writeSysctl(name, value); err != nil {
		return false, fmt.Errorf("sysctl %s = %s: %w", name, value, err)
	}
	return true, nil
}

// SyncSysctls sets what forwarding needs:
//
//   - net.ipv4.ip_forward and net.ipv6.conf.all.forwarding 1;
//   - accept_ra 2 on the uplinks that take router advertisements (1),
//     before forwarding would make them stop;
//   - forwarding 1 of the outside devices and ours, both families: a look-up in
//     the routing table on behalf of a packet heeds that of the device it came
//     by, which net.ipv4.ip_forward and conf.all set once and never again;
//   - net.ipv4.conf.all.send_redirects 0, for the kernel ors it with that of
//     the device: other devices keep their own setting (1 by default);
//   - rp_filter 2 and send_redirects 0 on our devices: the tunnel's and the
//     pods' host sides. The kernel takes the larger rp_filter of the device's
//     and all's, and 2 is the largest.
func (m *Manager) SyncSysctls(outside []Device) error {
	var errs []error
	set := func(name, value string) {
		_, err := m.nodeSysctl(name, value)
		errs = append(errs, err)
	}
	for _, d := range Uplinks(outside) {
		name := "net/ipv6/conf/" + d.Name + "/accept_ra"
		if have, err := m.readSysctl(name); err == nil && have == "1" {
			set(name, "2")
		}
	}
	set("net/ipv4/ip_forward", "1")
	set("net/ipv6/conf/all/forwarding", "1")
	set("net/ipv4/conf/all/send_redirects", "0")
	for _, d := range outside {
		set("net/ipv4/conf/"+d.Name+"/forwarding", "1")
		set("net/ipv6/conf/"+d.Name+"/forwarding", "1")
	}
	links, err := m.nl.LinkList()
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("list devices: %w", err))...)
	}
	for _, l := range links {
		name := l.Attrs().Name
		if name != OverlayName && !IsPodDevice(name) {
			continue
		}
		conf := "net/ipv4/conf/" + name
		errs = append(errs,
			m.ourSysctl(conf+"/forwarding", "1"),
			m.ourSysctl("net/ipv6/conf/"+name+"/forwarding", "1"),
			m.ourSysctl(conf+"/rp_filter", "2"),
			m.ourSysctl(conf+"/send_redirects", "0"))
	}
	return errors.Join(errs...)
}

// RestoreSysctls puts back every node-wide value that is still as we set it,
// and forgets the record.
func (m *Manager) RestoreSysctls() error {
	var errs []error
	for name, c := range m.state.Changed {
		have, err := m.readSysctl(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, fmt.Errorf("sysctl %s: %w", name, err))
			continue
		case have == c.New:
			if err := m.writeSysctl(name, c.Old); err != nil {
				errs = append(errs, fmt.Errorf("sysctl %s = %s: %w", name, c.Old, err))
				continue
			}
		default:
			m.log.Info("a sysctl was changed by another program since; left alone", "sysctl", name, "value", have)
		}
		delete(m.state.Changed, name)
	}
	if len(m.state.Changed) == 0 {
		if err := os.Remove(m.state.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	} else if err := m.state.save(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// LocalPorts are the ports that this host takes for its own connections, of
// both families.
func (m *Manager) LocalPorts() (sourceport.Range, error) {
	const name = "net/ipv4/ip_local_port_range"
	text, err := m.readSysctl(name)
	if err != nil {
		return sourceport.Range{}, fmt.Errorf("sysctl %s: %w", name, err)
	}
	var r sourceport.Range
	if n, err := fmt.Sscan(text, &r.Min, &r.Max); n != 2 || r.Len() <= 0 {
		return sourceport.Range{}, fmt.Errorf("sysctl %s: %q is no range of ports: %w", name, text, err)
	}
	return r, nil
}
