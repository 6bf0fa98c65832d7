package endpoint_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
)

// crash runs f until it reaches the given step and stops it there, as the
// death of the process would: nothing after it happens. It tells whether the
// step was reached.
func (b *bench) crash(at string, f func() error) (reached bool) {
	b.t.Helper()
	b.SetStep(func(step string) {
		if step == at {
			panic(errCrash)
		}
	})
	defer func() {
		if r := recover(); r != nil {
			if r != any(errCrash) {
				panic(r)
			}
			reached = true
		}
	}()
	if err := f(); err != nil {
		b.t.Error(err)
	}
	return false
}

var errCrash = errors.New("crash")

// steps are those of an operation, in order. What the writing of a file has for
// steps is left out: there a process has to die (see cmd/cni).
func (b *bench) steps(f func() error) []string {
	b.t.Helper()
	var out []string
	b.SetStep(func(step string) {
		if !strings.HasPrefix(step, "file ") {
			out = append(out, step)
		}
	})
	defer b.SetStep(nil)
	if err := f(); err != nil {
		b.t.Fatal(err)
	}
	if len(out) < 5 || len(slices.Compact(slices.Sorted(slices.Values(out)))) != len(out) {
		b.t.Fatalf("steps %q: too few, or not of different names", out)
	}
	return out
}

func TestCrashAnywhereInAddIsUndoneByRestart(t *testing.T) {
	b := newBench(t)
	first, _ := b.request("first")
	steps := b.steps(func() error { _, err := b.Add(t.Context(), first); return err })
	b.del(first)
	last := len(steps) - 1
	if steps[last] != "ready" {
		t.Fatalf("steps %q", steps)
	}
	for _, step := range steps[:last] {
		t.Run(step, func(t *testing.T) {
			req, _ := b.request("web", "10.244.80.65", "fd00:10:244:50::65")
			if !b.crash(step, func() error { _, err := b.Add(context.Background(), req); return err }) {
				t.Fatal("the step was not reached")
			}
			if err := b.restart(); err != nil {
				t.Error(err)
			}
			b.expectNothing()
			b.del(req)
			b.add(req)
			b.del(req)
			b.expectNothing()
		})
	}
	t.Run("ready", func(t *testing.T) {
		req, ns := b.request("web")
		if !b.crash("ready", func() error { _, err := b.Add(context.Background(), req); return err }) {
			t.Fatal("the step was not reached")
		}
		if err := b.restart(); err != nil {
			t.Error(err)
		}
		if err := b.Check(t.Context(), req); err != nil {
			t.Error(err)
		}
		b.expectTraffic(ns, b.List()[0])
		b.del(req)
		b.expectNothing()
	})
}

func TestCrashAnywhereInDelIsFinishedByRestart(t *testing.T) {
	b := newBench(t)
	first, _ := b.request("first")
	b.add(first)
	for _, step := range b.steps(func() error { return b.Del(t.Context(), first) }) {
		t.Run(step, func(t *testing.T) {
			req, _ := b.request("web")
			b.add(req)
			if !b.crash(step, func() error { return b.Del(context.Background(), req) }) {
				t.Fatal("the step was not reached")
			}
			if err := b.restart(); err != nil {
				t.Error(err)
			}
			if step == "locked" { // nothing is on disk yet: the runtime asks again
				b.del(req)
			}
			b.expectNothing()
			b.del(req)
		})
	}
}
