package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/podweir/podweir/internal/cniinstall"
)

// cniConf is the configuration that tells the node's runtime about the plugin,
// and with it the kubelet that this node can take pods. The zero value is of a
// node where somebody else sees to that.
type cniConf struct {
	dir  string // the runtime's
	from string // file to copy; empty = the default
}

// newCNIConf reads the configuration once, so that a mistake in it ends the
// process rather than waits for it to be ready.
func newCNIConf(cfg Config) (cniConf, error) {
	c := cniConf{cfg.CNIConfDir, cfg.CNIConf}
	if c.dir == "" {
		return c, nil
	}
	_, _, err := c.read()
	return c, err
}

func (c cniConf) read() (name string, data []byte, err error) {
	if c.from == "" {
		return cniinstall.DefaultConfName, cniinstall.DefaultConf(), nil
	}
	if data, err = os.ReadFile(c.from); err != nil {
		return "", nil, fmt.Errorf("CNI configuration: %w", err)
	}
	name = filepath.Base(c.from)
	return name, data, cniinstall.CheckConf(name, data)
}

// withdraw takes back what is there from before a reboot: the kubelet does not
// count this node as ready, and no pod is scheduled to it, until the dataplane
// is there. Where it is there already it works without an agent.
func (c cniConf) withdraw(loaded bool, log *slog.Logger) error {
	if c.dir == "" || loaded {
		return nil
	}
	removed, err := cniinstall.RemoveConf(c.dir)
	if err != nil {
		return fmt.Errorf("withdraw the CNI configuration until the dataplane is there: %w", err)
	}
	if removed {
		log.Info("CNI configuration withdrawn until the dataplane is there", "folder", c.dir)
	}
	return nil
}

// offer writes the configuration once the agent is ready, and keeps it there.
// It stays when the agent ends: the node keeps its pods, and the plugin waits
// for the next agent.
func (a *Agent) offer(ctx context.Context, c cniConf) {
	if c.dir == "" {
		return
	}
	select {
	case <-ctx.Done():
		return
	case <-a.begun:
	}
	t := time.NewTicker(verifyEvery)
	defer t.Stop()
	for {
		name, data, err := c.read()
		if err == nil {
			var changed bool
			var first string
			changed, first, err = cniinstall.Conf(c.dir, name, data)
			if changed {
				a.log.Info("CNI configuration written: the node can take pods", "file", filepath.Join(c.dir, name))
			}
			if err == nil && first != "" {
				err = fmt.Errorf("the runtime uses %s, which sorts before %s: pods are not podweir's; remove it", filepath.Join(c.dir, first), name)
			}
		}
		_ = a.do(ctx, func() { // the loop ends with ctx
			a.problem("CNI configuration", "", err)
			a.publish()
		})
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}
