package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/cniinstall"
	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/node"
)

// Cleanup removes everything an agent made on this node: programs, maps,
// routes, devices (those of running pods included), its state, the CNI plugin
// and its configuration where their folders are given; and puts back the
// sysctls that nobody has changed since. It refuses while an agent runs.
// What cannot be removed is reported and stops nothing else.
func Cleanup(cfg Config) error {
	stateDir, log := cfg.StateDir, cfg.Log
	if err := socketInUse(cfg.Socket); err != nil {
		return err
	}
	unlock, err := lockFolders(stateDir, cfg.BPFFS)
	if err != nil {
		return fmt.Errorf("cleanup: %w", err)
	}
	defer unlock()
	var errs []error
	if cfg.CNIConfDir != "" {
		// First of all: no pod is to be started any more.
		_, err := cniinstall.RemoveConf(cfg.CNIConfDir)
		errs = append(errs, err)
	}
	errs = append(errs, loader.Cleanup(cfg.BPFFS))
	stack, err := node.New(stateDir, cfg.Sysctls, log)
	if err != nil {
		errs = append(errs, err)
	} else {
		errs = append(errs, stack.RemoveRoutes(), stack.RemoveOverlay(), stack.RemovePods(), stack.RestoreSysctls())
		stack.Close()
	}
	// Only what is ours by name: the folder was the user's choice.
	for _, name := range []string{"endpoints", "deletions", "corrupt"} {
		errs = append(errs, os.RemoveAll(filepath.Join(stateDir, name)))
	}
	errs = append(errs, removeEmpty(stateDir), remove(cfg.Socket))
	if cfg.CNIBinDir != "" {
		errs = append(errs, cniinstall.RemoveProgram(cfg.CNIBinDir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cleanup: %w", err)
	}
	log.Info("removed what the agent left on this node", "bpffs", cfg.BPFFS, "stateDir", stateDir)
	return nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeEmpty removes a folder unless something of somebody else's is in it, or
// it is mounted, as in a container: then its being empty has to do.
func removeEmpty(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) > 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if err = remove(dir); errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EROFS) {
		return nil
	}
	return err
}
