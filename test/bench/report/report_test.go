package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
)

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		values  []float64
		q, want float64
	}{
		{nil, 0.5, 0},
		{[]float64{3}, 0.25, 3},
		{[]float64{1, 2}, 0.5, 1.5},
		{[]float64{1, 2, 3, 4, 5}, 0.25, 2},
		{[]float64{1, 2, 3, 4, 5}, 0.75, 4},
		{[]float64{1, 2, 3, 4}, 0.25, 1.75},
		{[]float64{1, 2, 3, 4}, 1, 4},
	} {
		if got := Quantile(c.values, c.q); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("quantile %v of %v: %v, want %v", c.q, c.values, got, c.want)
		}
	}
	if got := Median([]float64{9, 1, 5}); got != 5 {
		t.Errorf("median of values in any order: %v, want 5", got)
	}
}

func TestTable(t *testing.T) {
	table := Table{Title: "A table", Head: []string{"", "one|two"}, Rows: [][]string{{"row", "1.00"}, {"longer", "2"}}}
	var md, text bytes.Buffer
	table.Markdown(&md)
	if want := "A table:\n\n|  | one\\|two |\n|---|---|\n| row | 1.00 |\n| longer | 2 |\n\n"; md.String() != want {
		t.Errorf("Markdown:\n%s\nwant\n%s", md.String(), want)
	}
	table.Print(&text)
	if want := "A table\n\n         one|two\nrow      1.00\nlonger   2\n\n"; text.String() != want {
		t.Errorf("printed:\n%q\nwant\n%q", text.String(), want)
	}
}

// elements of an SVG, by name; an error if it is not well-formed.
func elements(t *testing.T, svg string) map[string][]map[string]string {
	t.Helper()
	out := map[string][]map[string]string{}
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("not well-formed: %v\n%s", err, svg)
		}
		if e, ok := token.(xml.StartElement); ok {
			attrs := map[string]string{}
			for _, a := range e.Attr {
				attrs[a.Name.Local] = a.Value
			}
			out[e.Name.Local] = append(out[e.Name.Local], attrs)
		}
	}
}

func TestChart(t *testing.T) {
	c := Chart{
		Title: "a < b & c", Axis: "ratio", Line: 1,
		Groups: []Group{
			{"udp", []Bar{{"fast", 0.5, 0.4, 0.75}, {"slow", 2, 1.5, 2}}},
			{"rr", []Bar{{"fast", 1, 1, 1}}},
		},
	}
	var b bytes.Buffer
	if err := c.SVG(&b); err != nil {
		t.Fatal(err)
	}
	got := elements(t, b.String())
	// The ground, two of the legend, three bars.
	if n := len(got["rect"]); n != 6 {
		t.Errorf("%d rectangles, want 6", n)
	}
	// 690 pixels are 2.
	bars := got["rect"][3:]
	for i, want := range []string{"172.5", "690.0", "345.0"} {
		if bars[i]["width"] != want {
			t.Errorf("bar %d is %s wide, want %s", i, bars[i]["width"], want)
		}
	}
	if bars[0]["fill"] != bars[2]["fill"] || bars[0]["fill"] == bars[1]["fill"] {
		t.Errorf("colours %s, %s, %s: one for each series is wanted", bars[0]["fill"], bars[1]["fill"], bars[2]["fill"])
	}
	// From 0.4 to 0.75.
	if d := got["path"][0]["d"]; !strings.HasPrefix(d, "M288.0 ") || !strings.Contains(d, "H408.8") {
		t.Errorf("the spread of the first bar is %s", d)
	}
}

// One bar that is much longer than the others does not make them invisible.
func TestChartCuts(t *testing.T) {
	c := Chart{Most: 2, Groups: []Group{{"udp", []Bar{{"fast", 1, 1, 1}, {"slow", 100, 90, 110}}}}}
	var b bytes.Buffer
	if err := c.SVG(&b); err != nil {
		t.Fatal(err)
	}
	bars := elements(t, b.String())["rect"][3:]
	if bars[0]["width"] != "345.0" || bars[1]["width"] != "690.0" {
		t.Errorf("bars are %s and %s wide, want 345.0 and 690.0", bars[0]["width"], bars[1]["width"])
	}
	if !strings.Contains(b.String(), "\u2026 100.00<") || strings.Contains(b.String(), "\u2026 1.00<") {
		t.Errorf("the bar that is cut, and that alone, should say so:\n%s", b.String())
	}
}

func TestChartRefuses(t *testing.T) {
	for name, c := range map[string]Chart{
		"nothing":  {},
		"zeroes":   {Groups: []Group{{"a", []Bar{{"s", 0, 0, 0}}}}},
		"NaN":      {Groups: []Group{{"a", []Bar{{"s", math.NaN(), 0, 1}}}}},
		"infinity": {Groups: []Group{{"a", []Bar{{"s", 1, 0, math.Inf(1)}}}}},
		"negative": {Groups: []Group{{"a", []Bar{{"s", 1, -1, 1}}}}},
	} {
		var b bytes.Buffer
		if err := c.SVG(&b); err == nil || b.Len() > 0 {
			t.Errorf("%s: error %v, %d bytes written", name, err, b.Len())
		}
	}
}
