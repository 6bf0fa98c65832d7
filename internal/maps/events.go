package maps

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/podweir/podweir/internal/bpf"
)

// Events is pw_events, where the programs tell of drops.
type Events struct {
	m *ebpf.Map
}

// NewEvents wraps the ring buffer.
func NewEvents(m *ebpf.Map) *Events { return &Events{m: m} }

// Open begins to read. What is read is gone, so there should be one reader.
func (e *Events) Open() (*EventReader, error) {
	r, err := ringbuf.NewReader(e.m)
	if err != nil {
		return nil, fmt.Errorf("%s: read: %w", bpf.DpMapPwEvents, err)
	}
	return &EventReader{r: r}, nil
}

// Close closes the file descriptor.
func (e *Events) Close() error {
	if e == nil || e.m == nil {
		return nil
	}
	return e.m.Close()
}

// EventReader reads the events one after the other.
type EventReader struct {
	r   *ringbuf.Reader
	rec ringbuf.Record
}

// Read waits for an event. The error wraps [os.ErrClosed] after Close, and
// [os.ErrDeadlineExceeded] after the deadline.
func (r *EventReader) Read() (Event, error) {
	var ev Event
	if err := r.r.ReadInto(&r.rec); err != nil {
		return ev, fmt.Errorf("%s: read: %w", bpf.DpMapPwEvents, err)
	}
	if err := binary.Read(bytes.NewReader(r.rec.RawSample), binary.NativeEndian, &ev); err != nil {
		return ev, fmt.Errorf("%s: an event of %d bytes: %w", bpf.DpMapPwEvents, len(r.rec.RawSample), err)
	}
	return ev, nil
}

// SetDeadline bounds how long Read waits; what is there is read in any case.
func (r *EventReader) SetDeadline(t time.Time) { r.r.SetDeadline(t) }

// Close ends a Read that waits.
func (r *EventReader) Close() error {
	return r.r.Close()
}
