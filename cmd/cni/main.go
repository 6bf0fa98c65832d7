package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/podweir/podweir/internal/cniapi"
	"github.com/podweir/podweir/internal/endpoint"
	"github.com/podweir/podweir/internal/version"
)

func main() {
	// Runtimes give no arguments, so these are somebody's at a terminal.
	if len(os.Args) > 1 {
		if os.Args[1] != "--version" || len(os.Args) > 2 {
			fmt.Fprintf(os.Stderr, "podweir-cni: unknown arguments %q: there is --version alone, container runtimes say the rest by CNI_ variables\n", os.Args[1:])
			os.Exit(2)
		}
		fmt.Println("podweir-cni version", version.String())
		return
	}
	run(func(string) {})
}

// run is the process. step is told how far an operation is: tests end the
// process there.
func run(step func(string)) {
	p := plugin{step: step, began: time.Now()}
	versions := cniversion.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0")
	err := skel.PluginMainFuncsWithError(skel.CNIFuncs{Add: p.add, Del: p.del, Check: p.check, GC: p.gc, Status: p.status},
		versions, "podweir-cni: CNI plugin of podweir "+version.String())
	if err == nil {
		return
	}
	if err.Code == types.ErrIncompatibleCNIVersion && err.Details == "" {
		err.Details = "supported are " + strings.Join(versions.SupportedVersions(), ", ")
	}
	if err := err.Print(); err != nil {
		fmt.Fprintln(os.Stderr, "podweir-cni: the error cannot be written:", err)
	}
	os.Exit(1)
}

type plugin struct {
	step  func(string)
	began time.Time
}

// start returns what every operation needs.
func (c *config) start(op string, args *skel.CmdArgs) (context.Context, context.CancelFunc, *cniapi.Client, *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: c.level})).
		With("op", op, "container", args.ContainerID, "ifname", args.IfName)
	log.Debug("start", "netns", args.Netns, "args", args.Args, "socket", c.Socket)
	return ctx, cancel, cniapi.NewClient(c.Socket), log
}

// read is what ADD and CHECK are given; prev is the result of plugins before
// this one, or of its own ADD.
func read(args *skel.CmdArgs) (c *config, req endpoint.Request, prev *types100.Result, err error) {
	if c, err = parseConfig(args.StdinData); err != nil {
		return nil, req, nil, err
	}
	if req, err = request(args, c); err != nil {
		return nil, req, nil, err
	}
	prev, err = previous(args.StdinData)
	return c, req, prev, err
}

func (p plugin) add(args *skel.CmdArgs) error {
	c, req, prev, err := read(args)
	if err != nil {
		return err
	}
	ctx, cancel, client, log := c.start("add", args)
	defer cancel()
	p.step("read")
	ep, err := client.Add(ctx, req)
	if err != nil {
		return cniError(err, types.ErrTryAgainLater)
	}
	p.step("answered")
	log.Info("done", "addrs", ep.Addrs, "took", time.Since(p.began))
	return types.PrintResult(result(ep, c.DNS, prev), c.CNIVersion)
}

// del succeeds without an agent: it leaves a note that the agent's start
// honours. As the agent looks for notes only once it listens, asking it again
// after the note is written leaves no moment in which a note is overlooked.
func (p plugin) del(args *skel.CmdArgs) error {
	c := lenientConfig(args.StdinData)
	ctx, cancel, client, log := c.start("del", args)
	defer cancel()
	key := endpoint.Key{ContainerID: args.ContainerID, IfName: args.IfName}
	if err := key.Validate(); err != nil {
		log.Warn("nothing can be there under this name", "err", err) // as ADD refuses it
		return nil
	}
	p.step("read")
	req, err := request(args, c)
	if err != nil {
		log.Warn("parameters are ignored", "err", err)
		req = endpoint.Request{ContainerID: args.ContainerID, IfName: args.IfName}
	}
	err = client.Del(ctx, req)
	p.step("asked")
	if !errors.Is(err, cniapi.ErrUnreachable) {
		return cniError(err, types.ErrInternal)
	}
	if queueErr := endpoint.QueueDeletion(c.StateDir, key, p.step); queueErr != nil {
		return types.NewError(types.ErrIOFailure, err.Error(), "the deletion cannot be queued either: "+queueErr.Error())
	}
	p.step("queued")
	if err := client.Del(ctx, req); err != nil {
		log.Warn("the deletion waits for the agent", "err", err)
		return nil
	}
	p.step("asked again")
	if err := endpoint.UnqueueDeletion(c.StateDir, key, p.step); err != nil {
		log.Warn("the note about a deletion that is done stays; it does no harm", "err", err)
	}
	p.step("unqueued")
	return nil
}

func (p plugin) check(args *skel.CmdArgs) error {
	c, req, prev, err := read(args)
	if err != nil {
		return err
	}
	if req.Addrs, req.MTU, err = told(prev, req); err != nil {
		return err
	}
	ctx, cancel, client, _ := c.start("check", args)
	defer cancel()
	return cniError(client.Check(ctx, req), types.ErrTryAgainLater)
}

func (p plugin) gc(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	if !c.hasValid {
		return badConfig("cni.dev/valid-attachments is missing: without it every pod would lose its network")
	}
	var valid []endpoint.Key
	for i, a := range c.ValidAttachments {
		if a.ContainerID == "" || a.IfName == "" {
			return badConfig("cni.dev/valid-attachments[%d]: containerID is %q and ifname %q: without both, somebody would lose the network", i, a.ContainerID, a.IfName)
		}
		valid = append(valid, endpoint.Key{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	ctx, cancel, client, _ := c.start("gc", args)
	defer cancel()
	return cniError(client.GC(ctx, c.Name, valid), types.ErrTryAgainLater)
}

func (p plugin) status(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	ctx, cancel, client, _ := c.start("status", args)
	defer cancel()
	err = client.Status(ctx)
	var e *endpoint.Error
	if errors.As(err, &e) && e.Code == endpoint.CodeTryAgain {
		return types.NewError(types.ErrPluginNotAvailable, e.Msg, e.Details)
	}
	return cniError(err, types.ErrPluginNotAvailable)
}

// cniError turns an error of the client into one of the specification, with
// the code given if no agent answered.
func cniError(err error, unreachable uint) error {
	var e *endpoint.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return types.NewError(uint(e.Code), e.Msg, e.Details)
	case errors.Is(err, cniapi.ErrUnreachable):
		return types.NewError(unreachable, err.Error(), "")
	}
	return types.NewError(types.ErrInternal, err.Error(), "")
}
