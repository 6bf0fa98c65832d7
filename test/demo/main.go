// Command pw-demo shows podweir at work: two nodes made of network
// namespaces, the pods and the service of examples/basic and the policy of
// examples/policy, with real traffic. Every step checks what it shows; the
// last line reads "N passed, M failed".
//
//	pw-demo run    shows everything and cleans up
//	pw-demo keep   shows everything and leaves it up
//	pw-demo down   removes what keep left
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

// label marks the demo's clusters among those of tests, and among those of
// other clones of the repository.
func label() (string, error) {
	root, err := cluster.Root()
	return "demo of " + root, err
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	mode := ""
	if len(os.Args) == 2 {
		mode = os.Args[1]
	}
	var err error
	switch mode {
	case "run", "keep":
		err = show(ctx, mode == "keep")
	case "down":
		err = down()
	default:
		fmt.Fprintln(os.Stderr, "usage: pw-demo run|keep|down")
		os.Exit(2)
	}
	if err != nil {
		if !errors.Is(err, errFailed) {
			fmt.Fprintln(os.Stderr, "pw-demo:", err)
		}
		os.Exit(1)
	}
}

// errFailed says that the closing line tells the rest.
var errFailed = errors.New("some steps failed")

type demo struct {
	c              *cluster.Cluster
	began          time.Time
	passed, failed int
}

func show(ctx context.Context, keep bool) (err error) {
	d := &demo{began: time.Now()}
	defer func() {
		fmt.Printf("\n%d passed, %d failed\n", d.passed, d.failed)
		if err == nil && (d.failed > 0 || d.passed == 0) {
			err = errFailed
		}
	}()
	if keep {
		if err := down(); err != nil {
			return err
		}
	}
	if d.step(ctx, "Two nodes, four pods", 45*time.Second, d.bringUp) {
		for _, s := range d.steps() {
			d.step(ctx, s.title, time.Minute, s.run)
		}
	}
	if d.c == nil {
		return nil
	}
	if d.failed > 0 {
		for _, n := range d.c.Nodes {
			fmt.Printf("\nagent of %s, end of its log:\n%s", n.NodeName, n.LogTail())
		}
	}
	if keep {
		if err := d.c.Keep(); err != nil {
			return err
		}
		d.lookAround()
		return nil
	}
	d.step(context.WithoutCancel(ctx), "Clean up", 30*time.Second, d.cleanUp)
	return nil
}

// step runs one step and counts it.
func (d *demo) step(ctx context.Context, title string, limit time.Duration, run func(context.Context) error) bool {
	fmt.Printf("\n== %s\n", title)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	start := time.Now()
	if err := run(ctx); err != nil {
		d.failed++
		fmt.Printf("   FAIL  %s\n", strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "\n         "))
		return false
	}
	d.passed++
	fmt.Printf("   ok (%.1f s)\n", time.Since(start).Seconds())
	return true
}

// say prints one line of what a step shows.
func say(format string, args ...any) { fmt.Printf("   "+format+"\n", args...) }

func (d *demo) cleanUp(context.Context) error {
	if err := d.c.Close(); err != nil {
		return err
	}
	runs, err := cluster.Runs()
	if err != nil {
		return err
	}
	for _, r := range runs {
		if r.ID == d.c.ID {
			return fmt.Errorf("run %s is still there", r.ID)
		}
	}
	say("namespaces, processes, mounts and files of this run are gone (%.0f s in all)", time.Since(d.began).Seconds())
	return nil
}

func down() error {
	mine, err := label()
	if err != nil {
		return err
	}
	runs, err := cluster.Runs()
	if err != nil {
		return err
	}
	for _, r := range runs {
		if r.Label != mine || !r.Kept {
			continue
		}
		if err := r.Remove(); err != nil {
			return err
		}
		fmt.Printf("removed the demo %s of %s\n", r.ID, r.Created.Format(time.DateTime))
	}
	return cluster.Sweep()
}

// lookAround tells what can be done with a kept demo.
func (d *demo) lookAround() {
	a := d.c.Node("node-a")
	client := d.c.Pod("default", "client")
	bin, err := cluster.BinDir()
	if err != nil {
		bin = "bin"
	}
	fmt.Printf(`
The demo stays up. To look around (make demo-down removes it):

  a shell on a node         nsenter --net=%[1]s bash
  a shell in a pod          nsenter --net=%[2]s bash
  call the service          nsenter --net=%[2]s %[3]s/pw-client send 10.98.235.247:80
  what podweir knows        nsenter --net=%[1]s %[3]s/podweir --socket %[4]s --bpffs %[5]s status
                            (also: services, flows, endpoints, policy, policy ask, monitor, nodes, metrics, doctor; -o wide, -o json)
  the maps                  bpftool map dump pinned %[5]s/maps/pw_flows
  the programs              ls %[5]s/links; bpftool prog show   (a recent bpftool: nsenter --net=%[1]s bpftool net)
  the underlay              nsenter --net=%[6]s tcpdump -ni tap1
  change the objects        $EDITOR %[7]s/
  the agents' logs          %[8]s/log/
`, a.Path(), client.Path(), bin, a.Socket(), a.BPFFS(), d.c.Switch.Path(), d.c.Manifests.Dir, d.c.Dir())
}
