// Command pw-bench-programs reads what go test says of the benchmarks of the
// programs (make bench-programs) and prints tables of it. The text itself is
// for benchstat. See docs/performance.md.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/podweir/podweir/test/bench/report"
)

func main() {
	json := flag.String("json", "", "file to write the figures to")
	flag.Parse()
	if err := run(os.Stdin, os.Stdout, *json); err != nil {
		fmt.Fprintln(os.Stderr, "pw-bench-programs:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, json string) error {
	all, failed, err := parse(in)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errors.New("there is no benchmark in what go test says")
	}
	res := results{Kernel: report.KernelRelease(), CPUs: runtime.NumCPU(), Time: time.Now().UTC(), Figures: figures(all)}
	res.print(out)
	if failed != "" {
		return fmt.Errorf("a benchmark failed:\n%s", failed)
	}
	if json != "" {
		return report.WriteJSON(json, res)
	}
	return nil
}
