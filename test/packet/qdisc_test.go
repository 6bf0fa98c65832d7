package packet

import (
	"testing"

	"github.com/podweir/podweir/internal/maps"
)

// A pod whose device has a qdisc gets its packets through it: out of the
// device like the stack's, marked, whatever way they come and whatever their
// flow is. When a qdisc comes or goes, running flows follow.
func TestQdiscOfAPod(t *testing.T) {
	both(t, func(t *testing.T, w *world) {
		shape := func(on bool) {
			w.edit(w.f.client, func(e *maps.Endpoint) {
				e.Flags = 0
				if on {
					e.Flags = maps.EndpointQdisc
				}
			})
		}
		through := func(r *result, want bool) {
			t.Helper()
			if got := r.mark&0x1000 != 0; got != want {
				t.Errorf("through the device: %v, want %v: %v", got, want, r)
			}
		}
		near := udp(ap(w.f.client, 40000), ap(w.f.local, podPort))
		far := w.conn(40001).open()
		w.ways()
		w.pod(devClient, near).is(fwdLocal, miss, created)
		through(w.pod(devLocal, near.back()).is(fwdLocal, hitNew), false)
		for _, on := range []bool{true, false, true} {
			shape(on)
			// The answers, whoever notices first.
			through(w.pod(devLocal, near.back()).ended(fwdLocal), on)
			through(w.pod(devLocal, near.back()).ended(fwdLocal), on)
			far.send(ack)
			through(far.reply(ack), on)
			through(w.arrive(outer().nodeB, far.answer).ended(fwdDecap), on)
			// And what begins there.
			through(w.pod(devLocal, udp(ap(w.f.local, 40002), ap(w.f.client, 40002))), on)
			through(w.pod(devLocal, udp(ap(w.f.local, 40002), ap(w.f.client, 40002))), on)
			// The other end has none.
			if r := w.pod(devClient, near); r.mark&0x1000 != 0 {
				t.Errorf("the pod without a qdisc: %v", r)
			}
		}
	})
}
