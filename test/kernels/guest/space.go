package main

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// space is a network namespace that lasts as long as the thread inside it.
type space struct {
	name  string
	ns    *os.File
	calls chan func()
}

func newSpace(name string) (*space, error) {
	s := &space{name: name, calls: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			s.ns, err = os.Open("/proc/thread-self/ns/net")
		}
		ready <- err
		if err != nil {
			return
		}
		for fn := range s.calls {
			fn()
		}
	}()
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("make network namespace %s: %w", name, err)
	}
	return s, nil
}

// do runs fn inside. Sockets that fn makes stay there.
func (s *space) do(fn func() error) error {
	errc := make(chan error, 1)
	s.calls <- func() { errc <- fn() }
	if err := <-errc; err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}

func (s *space) close() error {
	close(s.calls)
	return s.ns.Close()
}
