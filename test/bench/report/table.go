package report

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// A Table has a first row of names and rows as long as it.
type Table struct {
	Title string
	Head  []string
	Rows  [][]string
}

// Print aligns the columns with spaces.
func (t Table) Print(out io.Writer) {
	fmt.Fprintf(out, "%s\n\n", t.Title)
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	for _, row := range append([][]string{t.Head}, t.Rows...) {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush()
	fmt.Fprintln(out)
}

// Markdown is the same as a table of that.
func (t Table) Markdown(out io.Writer) {
	fmt.Fprintf(out, "%s:\n\n", t.Title)
	line := func(row []string) {
		fmt.Fprint(out, "|")
		for _, c := range row {
			fmt.Fprintf(out, " %s |", strings.NewReplacer("|", "\\|", "\n", " ").Replace(c))
		}
		fmt.Fprintln(out)
	}
	line(t.Head)
	fmt.Fprintln(out, strings.Repeat("|---", len(t.Head))+"|")
	for _, row := range t.Rows {
		line(row)
	}
	fmt.Fprintln(out)
}
