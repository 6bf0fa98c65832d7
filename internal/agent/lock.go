package agent

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// lockFolders takes folders for this process alone until the function
// returned is called or the process ends, however it ends. Two agents on one
// set of maps or one state folder, or a cleanup under a running agent, would
// undo each other's work. A folder that does not exist is nobody's.
func lockFolders(dirs ...string) (unlock func(), err error) {
	var held []*os.File
	unlock = func() {
		for _, f := range held {
			_ = f.Close() // which gives the lock back
		}
	}
	for _, dir := range dirs {
		f, err := os.Open(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			unlock()
			return nil, fmt.Errorf("lock folder: %w", err)
		}
		held = append(held, f)
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case errors.Is(err, unix.EWOULDBLOCK):
			unlock()
			return nil, fmt.Errorf("folder %s is in use by another podweir-agent: stop it first, or give this one its own --bpffs, --state-dir and --socket", dir)
		case err != nil:
			unlock()
			return nil, fmt.Errorf("lock folder %s: %w", dir, err)
		}
	}
	return unlock, nil
}
