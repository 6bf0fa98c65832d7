package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
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
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: del, Check: check, GC: gc, Status: status},
		cniversion.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0"),
		"podweir-cni: CNI plugin of podweir "+version.String())
}

// start returns what every operation needs.
func (c *config) start(op string, args *skel.CmdArgs) (context.Context, context.CancelFunc, *cniapi.Client, *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: c.level})).
		With("op", op, "container", args.ContainerID, "ifname", args.IfName)
	log.Debug("start", "netns", args.Netns, "args", args.Args, "socket", c.Socket)
	return ctx, cancel, cniapi.NewClient(c.Socket), log
}

func add(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	req, err := request(args, c)
	if err != nil {
		return err
	}
	ctx, cancel, client, log := c.start("add", args)
	defer cancel()
	ep, err := client.Add(ctx, req)
	if err != nil {
		return cniError(err, types.ErrTryAgainLater)
	}
	log.Info("done", "addrs", ep.Addrs)
	return types.PrintResult(result(ep, c.DNS), c.CNIVersion)
}

// del succeeds without an agent: it leaves a note that the agent's start
// honours. As the agent looks for notes only once it listens, asking it again
// after the note is written leaves no moment in which a note is overlooked.
func del(args *skel.CmdArgs) error {
	c := lenientConfig(args.StdinData)
	ctx, cancel, client, log := c.start("del", args)
	defer cancel()
	req, err := request(args, c)
	if err != nil {
		log.Warn("parameters are ignored", "err", err)
		req = endpoint.Request{ContainerID: args.ContainerID, IfName: args.IfName}
	}
	err = client.Del(ctx, req)
	if !errors.Is(err, cniapi.ErrUnreachable) {
		return cniError(err, types.ErrInternal)
	}
	if queueErr := endpoint.QueueDeletion(c.StateDir, req.Key()); queueErr != nil {
		return types.NewError(types.ErrIOFailure, err.Error(), "the deletion cannot be queued either: "+queueErr.Error())
	}
	if err := client.Del(ctx, req); err != nil {
		log.Warn("the deletion waits for the agent", "err", err)
		return nil
	}
	if err := endpoint.UnqueueDeletion(c.StateDir, req.Key()); err != nil {
		log.Warn("the note about a deletion that is done stays; it does no harm", "err", err)
	}
	return nil
}

func check(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	req, err := request(args, c)
	if err != nil {
		return err
	}
	if req.Addrs, err = previousAddrs(args.StdinData); err != nil {
		return err
	}
	ctx, cancel, client, _ := c.start("check", args)
	defer cancel()
	return cniError(client.Check(ctx, req), types.ErrTryAgainLater)
}

func gc(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	if !c.hasValid {
		return badConfig("cni.dev/valid-attachments is missing: without it every pod would lose its network")
	}
	ctx, cancel, client, _ := c.start("gc", args)
	defer cancel()
	var valid []endpoint.Key
	for _, a := range c.ValidAttachments {
		valid = append(valid, endpoint.Key{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return cniError(client.GC(ctx, c.Name, valid), types.ErrTryAgainLater)
}

func status(args *skel.CmdArgs) error {
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
