package endpoint

import (
	"context"
	"sync"
)

// keyLock is a set of mutexes by name, whose waiters may give up.
type keyLock struct {
	mu    sync.Mutex
	locks map[string]*keyLockEntry
}

type keyLockEntry struct {
	held  chan struct{} // one slot
	users int
}

// lock waits for the mutex of a name; the function returned gives it back.
func (l *keyLock) lock(ctx context.Context, name string) (unlock func(), err error) {
	l.mu.Lock()
	if l.locks == nil {
		l.locks = map[string]*keyLockEntry{}
	}
	e := l.locks[name]
	if e == nil {
		e = &keyLockEntry{held: make(chan struct{}, 1)}
		l.locks[name] = e
	}
	e.users++
	l.mu.Unlock()

	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if e.users--; e.users == 0 {
			delete(l.locks, name)
		}
	}
	select {
	case e.held <- struct{}{}:
		return func() { <-e.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
