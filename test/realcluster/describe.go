package realcluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Describe writes what one would look at when something on the cluster fails:
// its objects, as far as the API server tells them, and the end of every log,
// those of the pods of podweir and DNS too.
func (c Config) Describe(ctx context.Context, lines int) error {
	if _, err := os.Stat(c.State); err != nil {
		return fmt.Errorf("%s is not up, nor is anything left of it: %w", c.title(), err)
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if c.there() == nil {
		for _, args := range []string{"get nodes -o wide", "get pods -A -o wide", "get events -A --sort-by=.lastTimestamp"} {
			var out bytes.Buffer
			err := c.Kubectl(ctx, nil, &out, append(strings.Fields(args), "--request-timeout=5s")...)
			c.Out("# kubectl %s", args)
			if err != nil {
				c.Out("%v", err)
				continue
			}
			c.Out("%s", last(out.String(), lines))
		}
	}
	var files []string
	for _, pattern := range []string{c.cp("log", "*"), filepath.Join(c.State, "nodes", "*", "log", "*"),
		filepath.Join(c.State, "nodes", "*", "var-log", "pods", "kube-system_*", "*", "*.log")} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		slices.Sort(found)
		files = append(files, found...)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		if len(data) > 0 {
			c.Out("# %s\n%s", strings.TrimPrefix(f, c.State+"/"), last(string(data), lines))
		}
	}
	return nil
}

// last are so many lines of a text from its end.
func last(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
