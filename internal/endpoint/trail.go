package endpoint

import (
	"log/slog"
	"sync"
	"time"
)

// slowStep is when an operation that does not get on is worth a line in the
// log, while it hangs. What takes long as a rule is the kernel's lock over all
// network devices.
const slowStep = 5 * time.Second

// step tells tests where an operation is.
func (m *Manager) step(name string) {
	if m.cfg.Step != nil {
		m.cfg.Step(name)
	}
}

// trail follows one operation through its steps.
type trail struct {
	m     *Manager
	log   *slog.Logger
	began time.Time
	slow  *time.Timer

	mu   sync.Mutex
	at   string // the last step that is done
	last time.Time
	took []any
}

// begin starts a trail; the operation has just been asked for. It has to be
// ended.
func (m *Manager) begin(op, endpoint string) *trail {
	now := time.Now()
	t := &trail{m: m, log: m.log.With("op", op, "endpoint", endpoint), began: now, last: now, at: "begin"}
	t.slow = time.AfterFunc(slowStep, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.log.Warn("an operation does not get on", "after", t.at, "since", time.Since(t.last))
	})
	return t
}

// step is what has been done since the last one.
func (t *trail) step(name string) {
	t.mu.Lock()
	now := time.Now()
	t.took = append(t.took, slog.Duration(name, now.Sub(t.last)))
	t.at, t.last = name, now
	t.slow.Reset(slowStep)
	t.mu.Unlock()
	t.m.step(name)
}

func (t *trail) end() { t.slow.Stop() }

// done is the time that the operation took; the log has its steps.
func (t *trail) done() slog.Attr {
	t.log.Debug("steps", t.took...)
	return slog.Duration("took", time.Since(t.began))
}
