package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/podweir/podweir/internal/loader"
	"github.com/podweir/podweir/internal/node"
)

// Cleanup removes everything an agent made on this node: programs, maps,
// routes, devices (those of running pods included), its state; and puts back
// the sysctls that nobody has changed since. It refuses while an agent runs.
// What cannot be removed is reported and stops nothing else.
func Cleanup(bpffs, stateDir, socket string, log *slog.Logger) error {
	if err := socketInUse(socket); err != nil {
		return err
	}
	unlock, err := lockFolders(stateDir, bpffs)
	if err != nil {
		return fmt.Errorf("cleanup: %w", err)
	}
	defer unlock()
	errs := []error{loader.Cleanup(bpffs)}
	stack, err := node.New(stateDir, log)
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
	errs = append(errs, removeEmpty(stateDir), remove(socket))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cleanup: %w", err)
	}
	log.Info("removed what the agent left on this node", "bpffs", bpffs, "stateDir", stateDir)
	return nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeEmpty removes a folder unless something of somebody else's is in it.
func removeEmpty(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) > 0 {
		return nil
	}
	return errors.Join(err, remove(dir))
}
