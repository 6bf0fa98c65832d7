// Command podweir shows what the podweir dataplane of this node holds; see
// package cli.
package main

import (
	"context"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	status := cli.Run(ctx, os.Args[1:], cli.OSEnv())
	stop()
	os.Exit(status)
}
