package mesh

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/test/cluster"
)

// Outcomes of a probe.
const (
	Silent   = "silent"
	Answered = "answered"
	Refused  = "refused"
)

// Probe is one exchange to try.
type Probe struct {
	From   *cluster.Netns
	Source netip.Addr // to bind to; the zero Addr leaves it to the kernel
	Proto  string     // tcp or udp
	To     netip.AddrPort
}

func (p Probe) String() string { return fmt.Sprintf("%s %s -> %v", p.Proto, p.From.Name, p.To) }

// Result is what came of it.
type Result struct {
	Outcome string
	Server  string     // who answered
	Peer    netip.Addr // whom it saw
	Err     error      // why it was refused, or could not be sent
}

// settle is how long, in ms, a round that is complete listens on for answers
// that must not come; pace is how often drops are counted meanwhile.
const settle, pace = 10, 2

// unsure is the age at which a round with a SYN in it proves nothing any more:
// the kernel sends it again after a second, and it is counted twice. Only a
// starved machine gets there.
const unsure = 900 * time.Millisecond

// errUnsure is a round that has to be run again.
var errUnsure = errors.New("too slow to tell dropped packets from those sent again")

// Run tries all probes at a time. dropped returns a counter of packets
// dropped, by whatever reason concerns pods; the round is over when answers
// and drops account for all probes. With dropped nil the round is over when
// ctx is, or everything is answered.
func Run(ctx context.Context, probes []Probe, dropped func() (uint64, error)) ([]Result, error) {
	for {
		results, err := once(ctx, probes, dropped)
		if !errors.Is(err, errUnsure) || ctx.Err() != nil {
			return results, err
		}
	}
}

func once(ctx context.Context, probes []Probe, dropped func() (uint64, error)) ([]Result, error) {
	r := round{probes: probes, results: make([]Result, len(probes)), fds: make([]int, len(probes))}
	defer r.close()
	if err := r.open(); err != nil {
		return nil, err
	}
	var before uint64
	var err error
	if dropped != nil {
		if before, err = dropped(); err != nil {
			return nil, err
		}
	}
	start := time.Now()
	for i := range probes {
		r.send(i)
	}
	for r.waiting > 0 && ctx.Err() == nil {
		if err := r.poll(pace); err != nil {
			return nil, err
		}
		if dropped == nil {
			continue
		}
		now, err := dropped()
		if err != nil {
			return nil, err
		}
		if now-before >= uint64(r.waiting) {
			if err := r.listen(); err != nil {
				return nil, err
			}
			if time.Since(start) > unsure {
				return r.results, errUnsure
			}
			return r.results, nil
		}
	}
	return r.results, nil
}

// listen takes in what arrives until nothing has for a moment.
func (r *round) listen() error {
	for left := -1; r.waiting > 0 && left != r.waiting; {
		left = r.waiting
		if err := r.poll(settle); err != nil {
			return err
		}
	}
	return nil
}

type round struct {
	probes  []Probe
	results []Result
	fds     []int // -1 once over
	waiting int
}

// open makes the sockets, one visit to each namespace.
func (r *round) open() error {
	per := map[*cluster.Netns][]int{}
	for i, p := range r.probes {
		r.fds[i] = -1
		per[p.From] = append(per[p.From], i)
	}
	for ns, list := range per {
		err := ns.Do(func() error {
			for _, i := range list {
				p := r.probes[i]
				family, kind := unix.AF_INET, unix.SOCK_DGRAM
				if p.To.Addr().Is6() {
					family = unix.AF_INET6
				}
				if p.Proto == "tcp" {
					kind = unix.SOCK_STREAM
				}
				fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				r.fds[i] = fd
				if p.Source.IsValid() {
					if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(p.Source, 0))); err != nil {
						return fmt.Errorf("%v: bind to %v: %w", p, p.Source, err)
					}
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("sockets in %s: %w", ns.Name, err)
		}
	}
	return nil
}

func sockaddr(ap netip.AddrPort) unix.Sockaddr {
	if ap.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}
}

func (r *round) send(i int) {
	r.results[i].Outcome = Silent
	r.waiting++
	err := unix.Connect(r.fds[i], sockaddr(r.probes[i].To))
	if err == nil && r.probes[i].Proto == "udp" {
		_, err = unix.Write(r.fds[i], []byte("probe"))
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		r.over(i, Refused, err)
	}
}

// over ends one probe. A TCP connection is reset, so that nothing of it is
// sent again later.
func (r *round) over(i int, outcome string, err error) {
	r.results[i].Outcome, r.results[i].Err = outcome, err
	r.waiting--
	r.shut(i)
}

func (r *round) shut(i int) {
	if r.probes[i].Proto == "tcp" {
		_ = unix.SetsockoptLinger(r.fds[i], unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
	_ = unix.Close(r.fds[i])
	r.fds[i] = -1
}

func (r *round) close() {
	for i, fd := range r.fds {
		if fd >= 0 {
			r.shut(i)
		}
	}
}

func (r *round) poll(ms int) error {
	var set []unix.PollFd
	var which []int
	for i, fd := range r.fds {
		if fd >= 0 {
			set, which = append(set, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}), append(which, i)
		}
	}
	if _, err := unix.Poll(set, ms); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("poll: %w", err)
	}
	buf := make([]byte, 256)
	for n, pfd := range set {
		if pfd.Revents == 0 {
			continue
		}
		i := which[n]
		got, err := unix.Read(int(pfd.Fd), buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
		case err != nil:
			r.over(i, Refused, err)
		default:
			r.results[i].Server, r.results[i].Peer = parse(string(buf[:got]))
			r.over(i, Answered, nil)
		}
	}
	return nil
}
