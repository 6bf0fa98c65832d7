// Package testns runs a test binary in network and mount namespaces of its
// own, so that devices, routes, sysctls and mounts that tests make are gone
// with the process, however it ends.
//
// A test package calls [Main] from TestMain. The binary starts itself again
// inside the new namespaces (threads of a Go process cannot be moved
// together), and the tests run there. It needs root and says so.
package testns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
)

const (
	inside   = "PODWEIR_TEST_NAMESPACE"
	prepared = "prepared"
)

// Main runs m's tests inside new namespaces and exits. prepare runs there
// before the tests; nil means that there is nothing to prepare.
func Main(m *testing.M, prepare func() error) {
	if os.Getenv(inside) == "" {
		os.Exit(again())
	}
	// A fuzzer's workers are children in the namespace that is prepared.
	if prepare != nil && os.Getenv(inside) != prepared {
		if err := prepare(); err != nil {
			fmt.Fprintf(os.Stderr, "prepare the tests' namespace: %v\n", err)
			os.Exit(1)
		}
		os.Setenv(inside, prepared)
	}
	os.Exit(m.Run())
}

func again() int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests load programs into the kernel and make namespaces: run them as root")
		return 1
	}
	// The child dies with the thread that started it.
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:    syscall.SIGKILL,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode()
	}
	fmt.Fprintf(os.Stderr, "run the tests in namespaces of their own: %v\n", err)
	return 1
}
