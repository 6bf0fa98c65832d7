package contract

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/podweir/podweir/test/cluster"
)

// pause stops the client program of a flow, so that it sends nothing, and
// waits until the kernel has stopped it.
func pause(ctx context.Context, s *cluster.Stream) error {
	if err := s.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	return cluster.Eventually(ctx, func() error {
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.PID))
		if err != nil {
			return err
		}
		for _, th := range threads {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", s.PID, th.Name()))
			if err != nil {
				return err
			}
			_, rest, _ := strings.Cut(string(stat), ") ")
			if !strings.HasPrefix(rest, "T") {
				return fmt.Errorf("thread %s of the client is still running: %.1s", th.Name(), rest)
			}
		}
		return nil
	})
}

func resume(s *cluster.Stream) error { return s.Signal(syscall.SIGCONT) }

// removeRaw removes a file that was written as it is.
func (w *world) removeRaw(name string) error { return os.Remove(filepath.Join(w.Manifests.Dir, name)) }
