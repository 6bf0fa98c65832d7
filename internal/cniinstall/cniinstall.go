package cniinstall

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podweir/podweir/internal/wholefile"
)

// Plugin is the name of the plugin's program, and the type in configurations.
const Plugin = "podweir-cni"

// DefaultConfName is a name that sorts before those that other plugins have.
const DefaultConfName = "10-podweir.conflist"

// DefaultConf is the configuration of a node without wishes. Runtimes that know
// CNI 1.1 take that from cniVersions, older ones see cniVersion alone.
func DefaultConf() []byte {
	return []byte(`{
  "cniVersion": "1.0.0",
  "cniVersions": ["1.0.0", "1.1.0"],
  "name": "podweir",
  "plugins": [
    {"type": "podweir-cni", "capabilities": {"ips": true, "portMappings": true, "bandwidth": true}}
  ]
}
`)
}

// temporary marks names of files that are being written. No runtime reads
// names that end like this.
const temporary = ".podweir-tmp"

// makeFolder makes a folder where the one around it is there. Where it is not,
// the name is more likely a mistake than a wish: a runtime would never look
// there.
func makeFolder(what, dir string) error {
	err := os.Mkdir(dir, 0o755)
	if errors.Is(err, fs.ErrExist) {
		var st fs.FileInfo
		if st, err = os.Stat(dir); err == nil && !st.IsDir() {
			return fmt.Errorf("folder of %s: %s is a file", what, dir)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("folder of %s: %s cannot be made, as there is no %s: is the name right? If so, make that folder first (mkdir -p %s)",
			what, dir, filepath.Dir(dir), filepath.Dir(dir))
	}
	if err != nil {
		return fmt.Errorf("folder of %s: %w", what, err)
	}
	return nil
}

// Program copies the plugin into the folder of plugins.
func Program(from, dir string) (changed bool, err error) {
	data, err := os.ReadFile(from)
	if err != nil {
		return false, fmt.Errorf("CNI plugin: %w", err)
	}
	if err := makeFolder("CNI plugins", dir); err != nil {
		return false, err
	}
	if changed, err = replace(filepath.Join(dir, Plugin), data, 0o755); err != nil {
		return false, fmt.Errorf("CNI plugin: %w", err)
	}
	return changed, nil
}

// CheckConf says what is wrong with a configuration.
func CheckConf(name string, data []byte) error {
	if !isConf(name) {
		return fmt.Errorf("CNI configuration %s: runtimes read names that end with .conflist, .conf or .json", name)
	}
	var list struct {
		Name    string `json:"name"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("CNI configuration %s: %w", name, err)
	}
	if list.Name == "" {
		return fmt.Errorf("CNI configuration %s: it has no name", name)
	}
	if !ours(data) {
		return fmt.Errorf("CNI configuration %s: none of its plugins is %s", name, Plugin)
	}
	return nil
}

// Conf puts a configuration into the folder that the runtime reads. first
// names the file that the runtime takes instead, as it sorts before ours;
// empty as a rule.
func Conf(dir, name string, data []byte) (changed bool, first string, err error) {
	if err := CheckConf(name, data); err != nil {
		return false, "", err
	}
	if err := makeFolder("CNI configurations", dir); err != nil {
		return false, "", err
	}
	if changed, err = replace(filepath.Join(dir, name), data, 0o644); err != nil {
		return false, "", fmt.Errorf("CNI configuration: %w", err)
	}
	confs, err := readConfs(dir)
	if err != nil {
		return changed, "", err
	}
	for _, c := range confs {
		if c.ours && c.name != name {
			if err := remove(filepath.Join(dir, c.name)); err != nil {
				return changed, "", fmt.Errorf("CNI configuration of an earlier name: %w", err)
			}
			changed = true
		}
		if !c.ours && c.name < name && first == "" {
			first = c.name
		}
	}
	return changed, first, nil
}

// RemoveConf removes our configurations: the runtime then has no network to
// give, unless somebody else configured one.
func RemoveConf(dir string) (removed bool, err error) {
	confs, err := readConfs(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	var errs []error
	for _, c := range confs {
		if c.ours {
			errs = append(errs, remove(filepath.Join(dir, c.name)))
			removed = true
		}
	}
	return removed, errors.Join(append(errs, sweep(dir))...)
}

// RemoveProgram removes the plugin. Pods that it made can then not be deleted
// by the runtime: it comes last.
func RemoveProgram(dir string) error {
	return errors.Join(remove(filepath.Join(dir, Plugin)), sweep(dir))
}

type conf struct {
	name string
	ours bool
}

// readConfs are the configurations of a folder in the order in which runtimes
// choose.
func readConfs(dir string) ([]conf, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("folder of CNI configurations: %w", err)
	}
	var out []conf
	for _, e := range entries {
		if e.IsDir() || !isConf(e.Name()) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("CNI configuration: %w", err)
		}
		out = append(out, conf{e.Name(), ours(data)})
	}
	return out, nil
}

func isConf(name string) bool {
	return slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(name))
}

// ours tells whether a configuration, a list or a single one, names our plugin.
func ours(data []byte) bool {
	var c struct {
		Type    string `json:"type"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	if json.Unmarshal(data, &c) != nil {
		return false
	}
	for _, p := range c.Plugins {
		if p.Type == Plugin {
			return true
		}
	}
	return c.Type == Plugin
}

// replace makes a file be what it should, in one step.
func replace(name string, data []byte, mode fs.FileMode) (changed bool, err error) {
	dir := filepath.Dir(name)
	if err := sweep(dir); err != nil {
		return false, err
	}
	if have, err := os.ReadFile(name); err == nil && bytes.Equal(have, data) {
		if fi, err := os.Stat(name); err == nil && fi.Mode().Perm() == mode {
			return false, nil
		}
	}
	temp := filepath.Join(dir, "."+filepath.Base(name)+"-*"+temporary)
	err = wholefile.Write(name, wholefile.How{Temp: temp, Mode: mode, Durable: true}, wholefile.Bytes(data))
	return err == nil, err
}

// sweep removes what a crash left half written.
func sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), temporary) {
			errs = append(errs, remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

func remove(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
