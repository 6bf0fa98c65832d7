package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/podweir/podweir/internal/maps"
	"github.com/podweir/podweir/test/cluster"
)

//go:embed manifests.yaml
var manifests []byte

// A topology is two nodes joined by one cable, with three pods: client and
// local on node-a, remote on node-b.
type topology struct {
	c        *cluster.Cluster
	pods     map[string]*cluster.Pod
	objs     map[string]*corev1.Pod
	services map[string]*corev1.Service
	maps     map[string]maps.Set // by node, of agents
	ports    clientPorts         // of pods and of who is outside
}

func buildTopology(ctx context.Context, m mode) (*topology, error) {
	c, err := cluster.New(ctx, cluster.Config{Label: "bench-path " + m.topology, Wire: true, LogLevel: "warn", AgentArgs: m.agent, BinDir: m.bin})
	if err != nil {
		return nil, err
	}
	t := newTopology(c)
	objs, err := cluster.Decode(manifests)
	if err != nil {
		return t, err
	}
	for _, n := range c.Nodes {
		objs = append(objs, n.Object())
	}
	t.remember(objs)
	if m.podweir {
		err = t.plugPodweir(ctx, objs)
	} else {
		err = t.plugKernel(m.tunnel)
	}
	if err != nil {
		return t, err
	}
	return t, t.kernelPortRanges()
}

// kernelPortRanges keeps the kernel of every pod off the ports given out here.
func (t *topology) kernelPortRanges() error {
	for name, pod := range t.pods {
		if err := kernelPortRange(pod.Netns); err != nil {
			return fmt.Errorf("pod %s: %w", name, err)
		}
	}
	return nil
}

func newTopology(c *cluster.Cluster) *topology {
	return &topology{c: c, pods: map[string]*cluster.Pod{}, objs: map[string]*corev1.Pod{}, services: map[string]*corev1.Service{}, maps: map[string]maps.Set{}, ports: podPorts()}
}

// remember what is measured by name.
func (t *topology) remember(objs []cluster.Object) {
	for _, obj := range objs {
		switch obj := obj.(type) {
		case *corev1.Pod:
			t.objs[obj.Name] = obj
		case *corev1.Service:
			t.services[obj.Name] = obj
		}
	}
}

// close reports what the agents had to complain about, if anything failed.
func (t *topology) close() error {
	var errs []error
	for _, s := range t.maps {
		errs = append(errs, s.Close())
	}
	return errors.Join(append(errs, t.c.Close())...)
}

func (t *topology) plugPodweir(ctx context.Context, objs []cluster.Object) error {
	if err := t.c.Manifests.Put(objs...); err != nil {
		return err
	}
	return t.agents(ctx, objs)
}

// agents starts them when they can read the objects, and plugs the pods.
func (t *topology) agents(ctx context.Context, objs []cluster.Object) error {
	if err := t.c.StartAgents(ctx); err != nil {
		return err
	}
	if err := t.c.AddPods(ctx, objs...); err != nil {
		return err
	}
	for name := range t.objs {
		t.pods[name] = t.c.Pod("default", name)
	}
	for _, n := range t.c.Nodes {
		set, err := maps.OpenPinned(filepath.Join(n.BPFFS(), "maps"), true)
		if err != nil {
			return fmt.Errorf("%s: %w", n.NodeName, err)
		}
		t.maps[n.NodeName] = set
	}
	// The policies must be in force, or something easier would be measured.
	return errors.Join(
		t.denied(ctx, "client", "remote", "drop_policy_egress", listenPort+1),
		t.denied(ctx, "local", "remote", "drop_policy_ingress", listenPort),
	)
}

// denied sends datagrams until one is dropped for the reason.
func (t *topology) denied(ctx context.Context, from, to, reason string, port int) error {
	before, err := t.counters()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return cluster.Eventually(ctx, func() error {
		err := t.pods[from].Do(func() error {
			conn, err := net.Dial("udp", net.JoinHostPort(t.objs[to].Status.PodIPs[0].IP, strconv.Itoa(port)))
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte("may I?"))
			return err
		})
		if err != nil {
			return err
		}
		after, err := t.counters()
		if err != nil {
			return err
		}
		if after.since(before).sum("", "", reason) == 0 {
			return fmt.Errorf("%s to port %d of %s: not denied, %s did not grow", from, port, to, reason)
		}
		return nil
	})
}

// target is what the client calls: with agents the service, without the pod.
func (t *topology) target(m mode, family int) (netip.Addr, int) {
	var ips []string
	port := listenPort
	if m.podweir {
		ips, port = t.services[m.server].Spec.ClusterIPs, servicePort
	} else {
		for _, ip := range t.objs[m.server].Status.PodIPs {
			ips = append(ips, ip.IP)
		}
	}
	for _, ip := range ips {
		if a := netip.MustParseAddr(ip); a.Is4() == (family == 4) {
			return a, port
		}
	}
	return netip.Addr{}, 0 // the manifests have both
}
