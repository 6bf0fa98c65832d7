package endpoint

import (
	"context"
	"slices"
	"sync"
)

// atOnce is how many additions ask the kernel for devices at a time. It makes
// one after the other, whoever asks, and for each attached program it waits
// until no CPU is where it could meet the former: all that ask together would
// get their turn at every step, and be ready together, when the last is. So
// the first are done while others still wait, and the last no later. With two,
// one is at work while the other waits for policy.
const atOnce = 2

// turns are given in the order in which they are asked for; who had one goes
// before those that begin.
type turns struct {
	mu           sync.Mutex
	taken        int
	again, begin []chan struct{}
}

// turn is one addition's; the zero value has none.
type turn struct {
	all   *turns
	taken bool
	had   bool
}

// take waits for the turn. An addition that has it waits for nothing but the
// kernel.
func (t *turn) take(ctx context.Context) error {
	a := t.all
	a.mu.Lock()
	if a.taken < atOnce {
		a.taken++
		t.taken, t.had = true, true
		a.mu.Unlock()
		return nil
	}
	queue := &a.begin
	if t.had {
		queue = &a.again
	}
	mine := make(chan struct{})
	*queue = append(*queue, mine)
	a.mu.Unlock()
	select {
	case <-mine:
		t.taken, t.had = true, true
		return nil
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(*queue, mine); i >= 0 {
		*queue = slices.Delete(*queue, i, i+1)
	} else { // it came at the same moment
		a.next()
	}
	return errorf(CodeTryAgain, "other additions take too long: %w", context.Cause(ctx))
}

// leave ends the turn, if there is one.
func (t *turn) leave() {
	if !t.taken {
		return
	}
	t.taken = false
	t.all.mu.Lock()
	defer t.all.mu.Unlock()
	t.all.next()
}

// next gives a turn that has ended to whoever waits for it.
func (a *turns) next() {
	for _, queue := range []*[]chan struct{}{&a.again, &a.begin} {
		if len(*queue) > 0 {
			close((*queue)[0])
			*queue = slices.Delete(*queue, 0, 1)
			return
		}
	}
	a.taken--
}
