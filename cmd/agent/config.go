package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// fromFile sets the flags of cmd that the file names and the command line does
// not. The file is a YAML mapping of flag names to values, lists where a flag
// takes several. Flags of the agent that a subcommand does not have are known
// to it, and of no account.
func fromFile(cmd *cobra.Command, name string) error {
	data, err := os.ReadFile(name)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return fmt.Errorf("--config %s: %w", name, err)
	}
	if len(doc.Content) == 0 {
		return nil // an empty file, or one of comments
	}
	if doc.Content[0].Kind != yaml.MappingNode {
		return fmt.Errorf("--config %s: must be lines of FLAG: VALUE, such as routing-mode: direct", name)
	}
	seen := map[string]bool{}
	var errs []error
	for pairs := doc.Content[0].Content; len(pairs) > 1; pairs = pairs[2:] {
		key, value := pairs[0].Value, pairs[1]
		fail := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("--config %s:%d: %s", name, pairs[0].Line, fmt.Sprintf(format, args...)))
		}
		if seen[key] {
			fail("%s stands there twice", key)
			continue
		}
		seen[key] = true
		known := lookup(cmd.Root(), key)
		if known == nil || slices.Contains([]string{"config", "help", "version"}, key) {
			fail("there is no flag %q; podweir-agent --help lists them", key)
			continue
		}
		text, ok := scalar(value)
		if !ok {
			fail("%s: must be a value, or a list of values", key)
			continue
		}
		flag := lookup(cmd, key)
		if flag == nil || flag.Changed {
			continue
		}
		if err := flag.Value.Set(text); err != nil {
			fail("%s: %q: %v", key, text, err)
		}
	}
	return errors.Join(errs...)
}

func lookup(cmd *cobra.Command, name string) *pflag.Flag {
	if f := cmd.Flags().Lookup(name); f != nil {
		return f
	}
	return cmd.InheritedFlags().Lookup(name)
}

// scalar is a value as one writes it on the command line.
func scalar(n *yaml.Node) (string, bool) {
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value, n.Tag != "!!null"
	case yaml.SequenceNode:
		var list []string
		for _, c := range n.Content {
			if c.Kind != yaml.ScalarNode || c.Tag == "!!null" || strings.Contains(c.Value, ",") {
				return "", false
			}
			list = append(list, c.Value)
		}
		return strings.Join(list, ","), true
	}
	return "", false
}
