package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/fakeapi"
	"github.com/podweir/podweir/test/bench/report"
	"github.com/podweir/podweir/test/cluster"
)

// maxPolicyPods fit into the node's range beside the client.
const maxPolicyPods = 250

// Of three policies, each opens one port to the client and thereby closes all
// others.
const (
	closedPort = 7000
	openPorts  = 3 // from closedPort+1 on
)

type policiesResult struct {
	Pods    int       `json:"pods"`
	Median  float64   `json:"median"` // milliseconds
	Samples []float64 `json:"samples"`
}

// policyWorld is a node with pods on it: one that sends, the others receive.
type policyWorld struct {
	b    *bench
	in   []int // raw socket in each pod
	to   []netip.Addr
	out  int
	n    uint32
	buf  [2048]byte
	objs []fakeapi.Object
}

func measurePolicies(ctx context.Context, o options) (_ *policiesResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*bringUp)
	defer cancel()
	o.profile = ""
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	api := fakeapi.Start(l)
	defer api.Close()
	size{}.fill(api, nodes())
	b, err := newBench(ctx, o, size{Name: "policies"}, api, podweir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, b.sub.log())
		}
		err = errors.Join(err, b.close())
	}()
	w := &policyWorld{b: b, out: -1}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := b.node.StartAgent(ctx); err != nil {
		return nil, err
	}
	if err := w.pods(ctx, o.policies); err != nil {
		return nil, err
	}
	res := &policiesResult{Pods: o.policies}
	for range o.repeats {
		took, err := w.repeat(ctx)
		if err != nil {
			return nil, err
		}
		res.Samples = append(res.Samples, ms(took))
	}
	res.Median = report.Median(res.Samples)
	return res, nil
}

func (w *policyWorld) close() error {
	var err error
	for _, fd := range append(w.in, w.out) {
		if fd >= 0 {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	return err
}

func policyPod(name, role string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-of-" + name), Labels: map[string]string{"app": name, "role": role}},
		Spec:       corev1.PodSpec{NodeName: selfNode, Containers: []corev1.Container{{Name: "main"}}},
	}
}

// pods plugs the client and the servers, which the API knows by then.
func (w *policyWorld) pods(ctx context.Context, n int) error {
	add := func(name, role string) (*cluster.Pod, error) {
		obj := policyPod(name, role)
		w.b.api.Put(obj)
		pod, err := w.b.c.AddPod(ctx, obj)
		if err != nil {
			return nil, err
		}
		obj.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: pod.IPv4().String(), PodIPs: []corev1.PodIP{{IP: pod.IPv4().String()}}}
		w.b.api.Put(obj)
		return pod, nil
	}
	client, err := add("client", "client")
	if err != nil {
		return err
	}
	err = client.Do(func() (err error) {
		w.out, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("socket of the client: %w", err)
	}
	for i := range n {
		name := fmt.Sprintf("server-%03d", i)
		pod, err := add(name, "server")
		if err != nil {
			return err
		}
		w.to = append(w.to, pod.IPv4())
		err = pod.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
			if err != nil {
				return err
			}
			w.in = append(w.in, fd)
			return nil
		})
		if err != nil {
			return fmt.Errorf("raw socket of %s: %w", name, err)
		}
		for k := range openPorts {
			w.objs = append(w.objs, onePort(name, k+1))
		}
	}
	return nil
}

// onePort lets the client reach one port of a pod.
func onePort(app string, port int) *networkingv1.NetworkPolicy {
	udp, number := corev1.ProtocolUDP, intstr.FromInt32(int32(closedPort+port))
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s-%d", app, port)},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
			Ingress: []networkingv1.NetworkPolicyIngressRule{{
				From:  []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"role": "client"}}}},
				Ports: []networkingv1.NetworkPolicyPort{{Protocol: &udp, Port: &number}},
			}},
		},
	}
}

// repeat writes all policies at once and waits until every pod is isolated and
// its open ports open; then removes them and waits until all is open again.
func (w *policyWorld) repeat(ctx context.Context) (took time.Duration, err error) {
	if err := w.await(ctx, true); err != nil {
		return 0, fmt.Errorf("before there are policies: %w", err)
	}
	start := time.Now()
	w.b.api.Put(w.objs...)
	if err := w.await(ctx, false); err != nil {
		return 0, err
	}
	took = time.Since(start)
	w.b.api.Delete(w.objs...)
	if err := w.await(ctx, true); err != nil {
		return 0, fmt.Errorf("after the policies are gone: %w", err)
	}
	return took, nil
}

// await asks each pod until the closed port is open, or closed.
func (w *policyWorld) await(ctx context.Context, open bool) error {
	for i := range w.to {
		for {
			got, all, err := w.ask(i)
			if err != nil {
				return err
			}
			if all && got == open {
				break
			}
			select {
			case <-w.b.node.Agent().Done():
				return errors.New("the agent has ended")
			case <-ctx.Done():
				return fmt.Errorf("pod %v: the closed port is open: %v, the open ones are: %v: %w", w.to[i], got, all, ctx.Err())
			case <-time.After(100 * time.Microsecond):
			}
		}
	}
	return nil
}

// ask sends one datagram to each port of a pod. They arrive in order: when the
// last one has, or time is over, what has not arrived will not.
func (w *policyWorld) ask(i int) (closed, open bool, err error) {
	first := w.n + 1
	for k := range openPorts + 1 {
		w.n++
		payload := binary.BigEndian.AppendUint32(nil, w.n)
		err := unix.Sendto(w.out, payload, 0, &unix.SockaddrInet4{Port: closedPort + k, Addr: w.to[i].As4()})
		if err != nil && err != unix.EPERM && err != unix.ENOBUFS {
			return false, false, os.NewSyscallError("sendto", err)
		}
	}
	var arrived [openPorts + 1]bool
	for end := time.Now().Add(5 * time.Millisecond); ; {
		n, _, err := unix.Recvfrom(w.in[i], w.buf[:], 0)
		switch {
		case err == nil:
			if k, ok := datagram(w.buf[:n], first); ok && k <= openPorts {
				arrived[k] = true
				if k == openPorts {
					return arrived[0], arrived[1] && arrived[2] && arrived[3], nil
				}
			}
			continue
		case err == unix.EINTR:
			continue
		case err != unix.EAGAIN:
			return false, false, os.NewSyscallError("recvfrom", err)
		}
		left := time.Until(end)
		if left <= 0 {
			return arrived[0], false, nil
		}
		ts := unix.NsecToTimespec(left.Nanoseconds())
		if _, err := unix.Ppoll([]unix.PollFd{{Fd: int32(w.in[i]), Events: unix.POLLIN}}, &ts, nil); err != nil && err != unix.EINTR {
			return false, false, os.NewSyscallError("ppoll", err)
		}
	}
}

// datagram is the number of a datagram, counted from first, in an IPv4 packet.
func datagram(b []byte, first uint32) (int, bool) {
	t, ok := transport(b, unix.IPPROTO_UDP)
	if !ok || len(t) < 12 {
		return 0, false
	}
	n := binary.BigEndian.Uint32(t[8:])
	return int(n - first), n >= first
}
