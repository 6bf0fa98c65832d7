package report

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
)

// A Chart is groups of horizontal bars with their spread, drawn as SVG.
type Chart struct {
	Title, Note string
	Axis        string  // what the values are
	Line        float64 // a value to mark, 0 for none
	Most        float64 // longer bars are cut, and say so; 0 for none
	Groups      []Group
}

// A Group is the bars of one row.
type Group struct {
	Label string
	Bars  []Bar
}

// A Bar is a median with the quartiles around it. Bars of one series have one
// colour, which the legend tells.
type Bar struct {
	Series           string
	Value, Low, High float64
}

// Measures of a chart, in pixels.
const (
	chartWidth = 900
	chartLeft  = 150 // for the labels of groups
	chartRight = 60  // for values
	chartBar   = 14
	chartGap   = 14 // between groups
	chartTop   = 64 // for the title
	legendLine = 20
)

// colours are told apart by most people, on white.
func colours() []string {
	return []string{"#4c4c4c", "#999999", "#0072b2", "#56b4e9", "#009e73", "#66c2a5", "#d55e00", "#e69f00", "#cc79a7", "#f0e442"}
}

// series lists them in the order of their first bars.
func (c Chart) series() (out []string) {
	seen := map[string]bool{}
	for _, g := range c.Groups {
		for _, b := range g.Bars {
			if !seen[b.Series] {
				seen[b.Series] = true
				out = append(out, b.Series)
			}
		}
	}
	return out
}

// step is a round distance of marks, of which some five fit.
func step(most float64) float64 {
	raw := most / 5
	unit := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, n := range []float64{1, 2, 5, 10} {
		if n*unit >= raw {
			return n * unit
		}
	}
	return 10 * unit
}

// SVG writes the chart. One without a bar, or with one that is no number, is
// an error.
func (c Chart) SVG(out io.Writer) error {
	most, rows := c.Line, 0
	for _, g := range c.Groups {
		for _, b := range g.Bars {
			for _, v := range []float64{b.Value, b.Low, b.High} {
				if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
					return fmt.Errorf("chart %q, %s of %s: %v cannot be drawn", c.Title, b.Series, g.Label, v)
				}
				if c.Most > 0 {
					v = min(v, c.Most)
				}
				most = max(most, v)
			}
			rows++
		}
	}
	if rows == 0 || most <= 0 {
		return fmt.Errorf("chart %q has nothing to draw", c.Title)
	}
	series := c.series()
	colour := map[string]string{}
	for i, s := range series {
		colour[s] = colours()[i%len(colours())]
	}
	legend := (len(series) + 1) / 2 * legendLine
	plot := rows*chartBar + len(c.Groups)*chartGap
	top := chartTop + legend
	height := top + plot + 44
	x := func(v float64) float64 { return chartLeft + min(v, most)/most*(chartWidth-chartLeft-chartRight) }

	var s strings.Builder
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+"\n", chartWidth, height, chartWidth, height)
	fmt.Fprintf(&s, `<rect width="%d" height="%d" fill="white"/>`+"\n", chartWidth, height)
	text(&s, 12, 24, `font-size="16" font-weight="bold"`, c.Title)
	text(&s, 12, 44, `fill="#555"`, c.Note)
	for i, name := range series {
		lx, ly := 12+i%2*(chartWidth/2), chartTop+i/2*legendLine
		fmt.Fprintf(&s, `<rect x="%d" y="%d" width="11" height="11" fill="%s"/>`+"\n", lx, ly, colour[name])
		text(&s, float64(lx+16), float64(ly+10), "", name)
	}
	for v := 0.0; v <= most; v += step(most) {
		fmt.Fprintf(&s, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#ddd"/>`+"\n", x(v), top, x(v), top+plot)
		text(&s, x(v), float64(top+plot+14), `text-anchor="middle" fill="#555"`, fmt.Sprintf("%.4g", v))
	}
	text(&s, chartLeft, float64(top+plot+32), `fill="#555"`, c.Axis)
	y := top + chartGap/2
	for _, g := range c.Groups {
		text(&s, chartLeft-8, float64(y+len(g.Bars)*chartBar/2+4), `text-anchor="end"`, g.Label)
		for _, b := range g.Bars {
			mid := float64(y) + chartBar/2.0
			fmt.Fprintf(&s, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", chartLeft, y+1, x(b.Value)-chartLeft, chartBar-2, colour[b.Series])
			fmt.Fprintf(&s, `<path d="M%.1f %.1fH%.1fM%.1f %.1fv6M%.1f %.1fv6" stroke="black" fill="none"/>`+"\n",
				x(b.Low), mid, x(b.High), x(b.Low), mid-3, x(b.High), mid-3)
			value := fmt.Sprintf("%.2f", b.Value)
			if b.Value > most {
				value = "\u2026 " + value
			}
			text(&s, x(max(b.Value, b.High))+4, mid+4, `font-size="10"`, value)
			y += chartBar
		}
		y += chartGap
	}
	if c.Line > 0 {
		fmt.Fprintf(&s, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="black" stroke-dasharray="4 3"/>`+"\n", x(c.Line), top, x(c.Line), top+plot)
	}
	s.WriteString("</svg>\n")
	_, err := io.WriteString(out, s.String())
	return err
}

func text(s *strings.Builder, x, y float64, attrs, content string) {
	fmt.Fprintf(s, `<text x="%.1f" y="%.1f" %s>`, x, y, attrs)
	_ = xml.EscapeText(s, []byte(content)) // a Builder takes everything
	s.WriteString("</text>\n")
}
