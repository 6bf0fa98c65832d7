package endpoint

import (
	"log/slog"
	"time"
)

// slowStep is when a step is worth a line of its own in the log. What takes
// long as a rule is the kernel's lock over all network devices.
const slowStep = 5 * time.Second

// step tells tests where an operation is.
func (m *Manager) step(name string) {
	if m.cfg.Step != nil {
		m.cfg.Step(name)
	}
}

// trail follows one operation through its steps.
type trail struct {
	m           *Manager
	log         *slog.Logger
	began, last time.Time
	took        []any
}

// begin starts a trail; the operation has just been asked for.
func (m *Manager) begin(op, endpoint string) *trail {
	now := time.Now()
	return &trail{m: m, log: m.log.With("op", op, "endpoint", endpoint), began: now, last: now}
}

// step is what has been done since the last one.
func (t *trail) step(name string) {
	now := time.Now()
	took := now.Sub(t.last)
	t.last = now
	t.took = append(t.took, slog.Duration(name, took))
	if took > slowStep {
		t.log.Warn("a step took long", "step", name, "took", took)
	}
	t.m.step(name)
}

// done is the time that the operation took, and of its steps.
func (t *trail) done() slog.Attr {
	t.log.Debug("steps", t.took...)
	return slog.Duration("took", time.Since(t.began))
}
