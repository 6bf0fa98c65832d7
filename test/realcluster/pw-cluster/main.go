// Command pw-cluster brings up Kubernetes with podweir on this machine: see
// package realcluster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/realcluster"
)

const usage = `pw-cluster up [-proxy P] [-cni C]
                           builds what is missing, brings the cluster up
pw-cluster build [NAME...] builds the binaries of Kubernetes alone, or those named
pw-cluster down            ends it and removes all but the cache
pw-cluster check           tries pods, services, names and NodePorts on it
pw-cluster migrate [WAY]   from kube-proxy to podweir: whole, or node-by-node
pw-cluster describe        what is on it, and the end of every log
pw-cluster in NODE CMD...  runs a command in a node (n1, n2, ...)
pw-cluster outside CMD...  runs a command outside the nodes, where the API server is
pw-cluster kubectl ARGS... kubectl as administrator

pw-cluster power-off NODE  takes a node away as a loss of power would
pw-cluster power-on NODE   starts it over what it had on disk
pw-cluster restart-kubelet NODE
pw-cluster restart PART    of the control plane: etcd, kube-apiserver, ...
pw-cluster cut NODE        keeps a node and the API server from each other
pw-cluster mend NODE       ends that

PODWEIR_CLUSTER_CACHE and PODWEIR_CLUSTER_STATE are its folders. With
PODWEIR_CLUSTER_NAME it is about the cluster of that name, which has a network
namespace of its own, and a folder beside PODWEIR_CLUSTER_STATE.`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	err := command(ctx, os.Args[1:])
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 && len(os.Args) > 1 && slices.Contains([]string{"in", "outside", "kubectl"}, os.Args[1]) {
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
		flags := flag.NewFlagSet("up", flag.ContinueOnError)
		proxy := flags.String("proxy", "", "podweir, kube-proxy-nftables or kube-proxy-iptables")
		cni := flags.String("cni", "", "podweir; bridge: reference plugins, routes between nodes; bridge-vxlan")
		if err := flags.Parse(rest); err != nil {
			return err
		}
		if flags.NArg() > 0 {
			return fmt.Errorf("up takes no %q", flags.Arg(0))
		}
		if err := c.Choose(*proxy, *cni); err != nil {
			return err
		}
		return c.Up(ctx)
	case "build":
		return c.Build(ctx, rest...)
	case "check":
		return c.Check(ctx)
	case "migrate":
		if len(rest) > 1 {
			return errors.New("pw-cluster migrate [whole|node-by-node]")
		}
		return c.Migrate(ctx, append(rest, realcluster.Whole)[0])
	case "describe":
		return c.Describe(ctx, 40)
	case "down":
		return c.Down(ctx)
	case "in":
		if len(rest) < 2 {
			return errors.New("pw-cluster in NODE CMD...")
		}
		return c.Exec(ctx, rest[0], rest[1:]...)
	case "outside":
		if len(rest) < 1 {
			return errors.New("pw-cluster outside CMD...")
		}
		return c.Exec(ctx, "", rest...)
	case "kubectl":
		return c.ExecKubectl(ctx, rest...)
	case "power-off", "power-on", "restart-kubelet", "restart", "cut", "mend":
		if len(rest) != 1 {
			return fmt.Errorf("pw-cluster %s takes one name\n\n%s", verb, usage)
		}
		return fault(ctx, c, verb, rest[0])
	case "node-init":
		if len(rest) != 2 {
			return errors.New("pw-cluster node-init STATE NODE")
		}
		c.State = rest[0]
		return c.NodeInit(rest[1])
	default:
		return fmt.Errorf("%q is nothing that can be done\n\n%s", verb, usage)
	}
}

// fault does to a running cluster what tests do to it.
func fault(ctx context.Context, c realcluster.Config, verb, name string) error {
	switch verb {
	case "power-off":
		return c.PowerOff(ctx, name)
	case "power-on":
		return c.PowerOn(ctx, name)
	case "restart-kubelet":
		return c.RestartKubelet(name)
	case "restart":
		if err := c.StopPart(name); err != nil {
			return err
		}
		return c.StartPart(ctx, name)
	case "cut":
		_, err := c.Cut(ctx, name)
		return err
	default:
		return c.Mend(ctx, name)
	}
}
