package endpoint

import (
	"context"
	"errors"
	"runtime"
	"testing"
)

// Turns are given in order, those who had one before go first, and who gives
// up leaves no turn behind.
func TestTurns(t *testing.T) {
	var all turns
	held := make([]*turn, atOnce)
	for i := range held {
		held[i] = &turn{all: &all}
		if err := held[i].take(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	waiting := func() int {
		all.mu.Lock()
		defer all.mu.Unlock()
		return len(all.again) + len(all.begin)
	}
	came := make(chan string, 8)
	ask := func(name string, x *turn) {
		before := waiting()
		go func() {
			if err := x.take(t.Context()); err != nil {
				t.Error(err)
			}
			came <- name
		}()
		for waiting() == before {
			runtime.Gosched()
		}
	}
	first, second, back := &turn{all: &all}, &turn{all: &all}, &turn{all: &all, had: true}
	ask("first", first)
	ask("second", second)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error)
	go func() { gone <- (&turn{all: &all}).take(ctx) }()
	for waiting() != 3 {
		runtime.Gosched()
	}
	ask("back", back)
	cancel()
	var e *Error
	if err := <-gone; !errors.As(err, &e) || e.Code != CodeTryAgain || !errors.Is(err, context.Canceled) {
		t.Errorf("who gives up gets %v", err)
	}
	for i, want := range []struct {
		name string
		next *turn
	}{{"back", back}, {"first", first}, {"second", second}} {
		if i == 0 {
			held[0].leave()
			held[0].leave() // once is enough
		}
		if got := <-came; got != want.name {
			t.Fatalf("turn %d is of %s, want %s", i, got, want.name)
		}
		want.next.leave()
	}
	held[1].leave()
	if all.taken != 0 || waiting() != 0 {
		t.Errorf("%d turns are taken and %d wait when all have left", all.taken, waiting())
	}
}
