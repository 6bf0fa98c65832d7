package main

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// line is one result of one benchmark.
type line struct {
	Bench  string            // BenchmarkX without Benchmark
	Params map[string]string // of its name's key=value parts
	Values map[string]float64
}

// parse reads lines of benchmarks, and what go test says where one failed.
func parse(in io.Reader) (out []line, failed string, err error) {
	sc := bufio.NewScanner(in)
	sc.Buffer(nil, 1<<20)
	failing := false
	for sc.Scan() {
		text := sc.Text()
		if strings.HasPrefix(text, "--- FAIL") || strings.HasPrefix(text, "FAIL") || strings.HasPrefix(text, "panic:") {
			failing = true
		}
		name, rest, ok := strings.Cut(text, "\t")
		if !strings.HasPrefix(name, "Benchmark") || !ok {
			if failing {
				failed += text + "\n"
			}
			continue
		}
		failing = false
		l, err := parseLine(strings.TrimSpace(name), strings.Fields(rest))
		if err != nil {
			return nil, "", fmt.Errorf("%q: %w", text, err)
		}
		out = append(out, l)
	}
	return out, failed, sc.Err()
}

func parseLine(name string, fields []string) (line, error) {
	// The last part ends in the number of processors.
	if at := strings.LastIndexByte(name, '-'); at > 0 {
		if _, err := strconv.Atoi(name[at+1:]); err == nil {
			name = name[:at]
		}
	}
	parts := strings.Split(strings.TrimPrefix(name, "Benchmark"), "/")
	l := line{Bench: parts[0], Params: map[string]string{}, Values: map[string]float64{}}
	for _, p := range parts[1:] {
		k, v, ok := strings.Cut(p, "=")
		if !ok {
			return l, fmt.Errorf("part %q of the name is not key=value", p)
		}
		l.Params[k] = v
	}
	// How often it ran, then values with their units.
	if len(fields) < 3 || len(fields)%2 != 1 {
		return l, fmt.Errorf("not a count and values with units")
	}
	for i := 1; i < len(fields); i += 2 {
		v, err := strconv.ParseFloat(fields[i], 64)
		if err != nil {
			return l, err
		}
		l.Values[fields[i+1]] = v
	}
	return l, nil
}
