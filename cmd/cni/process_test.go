package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/podweir/podweir/internal/cniapi"
	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/endpoint/endpointtest"
	"github.com/podweir/podweir/internal/ipam"
)

// The test binary is also the plugin, and an agent, that die where the test
// says, and plugins before and after ours in a list.
const (
	asEnv    = "PODWEIR_TEST_AS"    // which of them a process is
	dieEnv   = "PODWEIR_TEST_DIE"   // the number of the step that is its last, from 1
	stepsEnv = "PODWEIR_TEST_STEPS" // file to write the names of its steps to
	stateEnv = "PODWEIR_TEST_STATE"
	sockEnv  = "PODWEIR_TEST_SOCKET"
)

func runAs(as string) int {
	switch as {
	case "plugin":
		run(stepper())
		return 0
	case "agent":
		if err := runAgent(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	fmt.Fprintf(os.Stderr, "%s=%s is unknown\n", asEnv, as)
	return 1
}

// stepper notes each step, and ends the process with SIGKILL at one of them.
func stepper() func(string) {
	last, _ := strconv.Atoi(os.Getenv(dieEnv))
	count := 0
	var mu sync.Mutex
	return func(step string) {
		mu.Lock()
		defer mu.Unlock()
		count++
		if f, err := os.OpenFile(os.Getenv(stepsEnv), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
			fmt.Fprintln(f, step)
			f.Close()
		}
		if count == last {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // it arrives
		}
	}
}

// runAgent says "ready" and serves until it is killed.
func runAgent() error {
	fakes, alloc := &endpointtest.Fakes{}, &ipam.Allocator{}
	err := alloc.SetCIDRs([]netip.Prefix{netip.MustParsePrefix("10.244.80.0/24"), netip.MustParsePrefix("fd00:10:244:50::/64")})
	if err != nil {
		return err
	}
	m, err := endpoint.New(endpoint.Config{
		StateDir: os.Getenv(stateEnv), IPAM: alloc, Datapath: fakes, Regenerator: fakes, MTU: func() int { return 1450 }, Step: stepper(),
	})
	if err != nil {
		return err
	}
	l, err := cniapi.Listen(os.Getenv(sockEnv))
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- http.Serve(l, cniapi.Handler(m)) }()
	if err := m.Restore(context.Background()); err != nil {
		return err
	}
	fmt.Println("ready")
	return <-served
}

// process is one of these processes. It dies with the test's.
func (n *node) process(as string, die int, env ...string) *exec.Cmd {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(env, asEnv+"="+as, dieEnv+"="+strconv.Itoa(die), stepsEnv+"="+n.stepsFile(), stateEnv+"="+n.state, sockEnv+"="+n.socket)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

func (n *node) stepsFile() string { return filepath.Join(filepath.Dir(n.state), "steps") }

// takeSteps returns the steps that processes made, and forgets them.
func (n *node) takeSteps() []string {
	n.t.Helper()
	data, err := os.ReadFile(n.stepsFile())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.t.Fatal(err)
	}
	_ = os.Remove(n.stepsFile())
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

// died waits for the end of a process and tells whether SIGKILL was it.
func (n *node) died(cmd *exec.Cmd) bool {
	n.t.Helper()
	err := cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		n.t.Fatal(err)
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}
