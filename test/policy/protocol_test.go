package policy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// other is a protocol of no use (RFC 3692) that no rule of a policy can name.
const other = 253

// P8: ICMP, and every other protocol without ports, is isolated with the pod,
// and allowed by rules without ports alone; SCTP rules open none.
func (w *world) protocols() {
	const pods, in = "x/in\npodSelector: {}\ningress:\n", "- from: [{namespaceSelector: {matchLabels: {team: blue}}}]"
	for _, c := range []struct {
		doc              string
		friend, stranger bool // v/a, z/a may send to x
	}{
		{"", true, true},
		{"x/in\npodSelector: {}", false, false},
		{pods + in, true, false},
		{pods + in + "\n  ports: []", true, false},
		{pods + in + "\n  ports: [{}]", false, false},
		{pods + in + "\n  ports: [{protocol: UDP}, {protocol: TCP}, {protocol: SCTP}]", false, false},
		{"v/out\npodSelector: {}\npolicyTypes: [Egress]", false, true},
		{"v/out\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- to: [{podSelector: {}}]\n- to: [{namespaceSelector: {}}]\n  ports: [{}]", false, true},
		{"v/out\npodSelector: {}\npolicyTypes: [Egress]\negress: [{to: [{namespaceSelector: {matchLabels: {team: red}}}]}]", true, true},
	} {
		if c.doc != "" {
			w.apply(c.doc)
		}
		// To the other node and, with z/b, on one.
		for _, p := range []struct {
			from, to string
			want     bool
		}{{"v/a", "x/b", c.friend}, {"v/a", "x/a", c.friend}, {"z/a", "x/a", c.stranger}, {"z/b", "x/c", c.stranger}} {
			for i := range 2 {
				for _, proto := range []int{unix.IPPROTO_ICMP, other} {
					if got := w.arrives(p.from, p.to, i, proto); got != p.want {
						w.Errorf("%q: %s -> %v, protocol %d: arrives %v, want %v", c.doc, p.from, w.addrs(p.to)[i], proto, got, p.want)
					}
				}
			}
		}
		w.clear()
	}
}

// arrives says whether a packet of a protocol gets there, for ICMP whether an
// echo is answered; one that does not is counted as dropped.
func (w *world) arrives(from, to string, family, proto int) bool {
	w.Helper()
	src, dst := w.addrs(from)[family], w.addrs(to)[family]
	af := unix.AF_INET
	if src.Is6() {
		af = unix.AF_INET6
	}
	w.marks++
	id := binary.BigEndian.AppendUint16(nil, uint16(0x4000+w.marks))
	heard, sent, at := id, append([]byte(nil), id...), to
	if proto == unix.IPPROTO_ICMP {
		at = from // where the answer comes
		echo, reply := byte(8), byte(0)
		if src.Is6() {
			proto, echo, reply = unix.IPPROTO_ICMPV6, 128, 129
		}
		sent = append([]byte{echo, 0, 0, 0}, append(id, 0, 1)...)
		if src.Is4() {
			binary.BigEndian.PutUint16(sent[2:], internetChecksum(sent))
		}
		heard = append([]byte{reply, 0}, id...)
	}
	var fd int
	w.must(w.netns(at).Do(func() (err error) {
		fd, err = unix.Socket(af, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
		return err
	}))
	defer unix.Close(fd)
	before, err := w.dropped()
	w.must(err)
	w.must(w.netns(from).Do(func() error { return sendRaw(af, proto, src, dst, sent) }))
	buf := make([]byte, 256)
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, 2); err != nil && !errors.Is(err, unix.EINTR) {
			w.Fatal(os.NewSyscallError("poll", err))
		}
		for {
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if err != nil {
				break
			}
			b := buf[:n]
			if af == unix.AF_INET {
				b = b[20:]
			}
			if at == from && len(b) >= 6 {
				b = append(append([]byte{}, b[:2]...), b[4:6]...)
			}
			if string(b) == string(heard) {
				return true
			}
		}
		now, err := w.dropped()
		w.must(err)
		if now > before {
			return false
		}
	}
	w.Fatalf("%s -> %v, protocol %d: neither there nor dropped", from, dst, proto)
	return false
}

// P6: a name stands for each destination's own port of that protocol; nobody's
// name is no port.
func (w *world) namedPorts() {
	for _, docs := range [][]string{
		{"x/in-name\npodSelector: {}\ningress:\n- ports: [{port: http}]"},
		{"x/in-name-udp\npodSelector: {}\ningress:\n- ports: [{port: dns, protocol: UDP}]"},
		{"x/in-nobody\npodSelector: {}\ningress:\n- ports: [{port: nosuch}]"},
		{"x/in-name-of\npodSelector: {}\ningress:\n- ports: [{port: http}, {port: http, protocol: UDP}]\n  from: [{podSelector: {}}, {namespaceSelector: {matchLabels: {team: blue}}}]"},
		{"x/out-name\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- ports: [{port: http}]"},
		{"x/out-name-udp\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- ports: [{port: http, protocol: UDP}, {port: dns, protocol: UDP}]"},
		{"z/out-nobody\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- ports: [{port: nosuch}, {port: nosuch, protocol: UDP}]"},
		{
			"v/out-name\npodSelector: {}\npolicyTypes: [Egress]\negress:\n- ports: [{port: http}]\n  to: [{namespaceSelector: {matchLabels: {team: red}}}, {podSelector: {}}]",
			"v/in-number\npodSelector: {}\ningress:\n- ports: [{port: 8081}]",
		},
	} {
		w.apply(docs...)
		w.check()
		w.clear()
	}
	// The pod behind a name changes its number.
	w.apply("x/in-name\npodSelector: {}\ningress:\n- ports: [{port: http}]")
	p := w.pods["x/a"]
	had := p.Spec.Containers[0].Ports
	p.Spec.Containers[0].Ports = containerPorts("http=8081/TCP")
	w.must(w.c.Manifests.Put(p))
	w.settled()
	w.check()
	p.Spec.Containers[0].Ports = had
	w.must(w.c.Manifests.Put(p))
}

// P5: a pod on the host's network is its node: no label of it, and no name of
// its namespace, makes anything of it, and no policy isolates it.
func (w *world) hostNetwork() {
	p := w.newPod("x", "hosted", "node-b", "app=a tier=front")
	delete(w.pods, "x/hosted") // the matrix has the node
	p.Spec.HostNetwork = true
	for i, a := range w.addrs("node-b") {
		p.Status.PodIPs[i].IP = a.String()
	}
	p.Status.PodIP = p.Status.PodIPs[0].IP
	w.must(w.c.Manifests.Put(p))
	defer func() { w.must(w.c.Manifests.Delete(p)) }()
	for _, docs := range [][]string{
		{"x/by-pod\npodSelector: {}\ningress:\n- from: [{podSelector: {matchLabels: {tier: front}}}]"},
		{"v/by-namespace\npodSelector: {}\npolicyTypes: [Ingress, Egress]\ningress:\n- from: [{namespaceSelector: {}}]\negress:\n- to: [{namespaceSelector: {}}]"},
		{"x/not-the-host\npodSelector: {matchLabels: {app: a}}\npolicyTypes: [Ingress, Egress]"},
		{"v/by-block\npodSelector: {}\ningress:\n- from: [{ipBlock: {cidr: " + w.addrs("node-b")[0].String() + "/32}}, {ipBlock: {cidr: '" + w.addrs("node-b")[1].String() + "/128'}}]"},
		{"no-pods\ntier: Admin\npriority: 1\nsubject: {namespaces: {}}\ningress:\n- action: Deny\n  from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {tier: front}}}}]\negress:\n- action: Deny\n  to: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {tier: front}}}}]"},
	} {
		w.apply(docs...)
		w.check()
		w.clear()
	}
}

// allBut is everything but one address, in both families.
func allBut(a []netip.Addr) string {
	return fmt.Sprintf("[{ipBlock: {cidr: 0.0.0.0/0, except: [%v/32]}}, {ipBlock: {cidr: '::/0', except: ['%v/128']}}]", a[0], a[1])
}

func just(a []netip.Addr) string {
	return fmt.Sprintf("[{ipBlock: {cidr: %v/32}}, {ipBlock: {cidr: '%v/128'}}]", a[0], a[1])
}
