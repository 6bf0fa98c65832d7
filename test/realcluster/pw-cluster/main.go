// Command pw-cluster brings up Kubernetes with podweir on this machine: see
// package realcluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/realcluster"
)

const usage = `pw-cluster up              builds what is missing, brings the cluster up
pw-cluster build           builds the binaries of Kubernetes alone
pw-cluster down            ends it and removes all but the cache
pw-cluster in NODE CMD...  runs a command in a node (n1, n2, ...)
pw-cluster kubectl ARGS... kubectl as administrator

PODWEIR_CLUSTER_CACHE and PODWEIR_CLUSTER_STATE are its folders.`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	err := command(ctx, os.Args[1:])
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 && len(os.Args) > 1 && (os.Args[1] == "in" || os.Args[1] == "kubectl") {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pw-cluster:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	// bin/pw-cluster lies in the tree that it is about.
	c, err := realcluster.Default(filepath.Dir(filepath.Dir(self)))
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return errors.New("what is to be done?\n\n" + usage)
	}
	switch verb, rest := args[0], args[1:]; verb {
	case "up":
		return c.Up(ctx)
	case "build":
		return c.Build(ctx)
	case "down":
		return c.Down(ctx)
	case "in":
		if len(rest) < 2 {
			return errors.New("pw-cluster in NODE CMD...")
		}
		return c.Exec(ctx, rest[0], rest[1:]...)
	case "kubectl":
		cmd := exec.CommandContext(ctx, c.KubectlPath(), append([]string{"--kubeconfig=" + c.Kubeconfig()}, rest...)...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		return cmd.Run()
	case "node-init":
		if len(rest) != 1 {
			return errors.New("pw-cluster node-init NODE")
		}
		return c.NodeInit(rest[0])
	default:
		return fmt.Errorf("%q is nothing that can be done\n\n%s", verb, usage)
	}
}
