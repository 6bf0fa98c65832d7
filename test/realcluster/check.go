package realcluster

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/podweir/podweir/test/tools/probe"
)

//go:embed manifests/check.yaml
var checkManifest string

// Check tries what every cluster must do, whoever does services and connects
// pods: pods of all nodes reach each other, a service by its name and its
// addresses, and somebody outside its NodePort on every node; TCP and UDP, both
// families. It leaves nothing in the cluster.
func (c Config) Check(ctx context.Context) (err error) {
	if err := c.there(); err != nil {
		return err
	}
	begin := time.Now()
	ns := fmt.Sprintf("check-%d", begin.UnixNano())
	if err := c.Kubectl(ctx, nil, io.Discard, "create", "namespace", ns); err != nil {
		return err
	}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		if err != nil {
			for _, args := range []string{"get pods -o wide", "get service,endpointslices", "get events"} {
				var out bytes.Buffer
				err := c.Kubectl(ctx, nil, &out, append([]string{"-n", ns}, strings.Fields(args)...)...)
				c.Out("# kubectl %s (%v)\n%s", args, err, out.String())
			}
		}
		err = errors.Join(err, c.Kubectl(ctx, nil, io.Discard, "delete", "namespace", ns, "--wait=false"))
	}()
	manifest := strings.ReplaceAll(checkManifest, "$IMAGE", toolsImage)
	if err := c.Kubectl(ctx, strings.NewReader(manifest), io.Discard, "-n", ns, "apply", "-f", "-"); err != nil {
		return err
	}
	if err := c.Kubectl(ctx, nil, io.Discard, "-n", ns, "rollout", "status", "daemonset/web", "--timeout=120s"); err != nil {
		return err
	}
	var pods struct{ Items []checkPod }
	var service checkService
	for what, to := range map[string]any{"pods": &pods, "service/web": &service} {
		var out bytes.Buffer
		if err := c.Kubectl(ctx, nil, &out, "-n", ns, "get", what, "-o", "json"); err != nil {
			return err
		}
		if err := json.Unmarshal(out.Bytes(), to); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	calls, err := c.calls(ns, pods.Items, service)
	if err != nil {
		return err
	}
	var g errgroup.Group
	for _, some := range calls {
		g.Go(func() error {
			for _, call := range some {
				if err := c.try(ctx, call); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("check of %s, %v: %w", c.title(), c.settings(), err)
	}
	count := 0
	for _, some := range calls {
		count += len(some)
	}
	c.Out("%6.1f s  check: %d ways to %d pods, all good", time.Since(begin).Seconds(), count, len(pods.Items))
	return nil
}

type checkPod struct {
	Metadata struct{ Name string }
	Spec     struct{ NodeName string }
	Status   struct{ PodIPs []struct{ IP string } }
}

type checkService struct {
	Spec struct {
		ClusterIPs []string
		Ports      []struct {
			Protocol string
			NodePort int
		}
	}
}

// call is one that has to be answered.
type call struct {
	what    string // for errors
	prefix  []string
	proto   string
	target  string
	servers []string // one of these answers
}

// calls are those of each caller: every pod, and somebody outside.
func (c Config) calls(ns string, pods []checkPod, service checkService) (map[string][]call, error) {
	if len(pods) != c.Nodes || len(service.Spec.ClusterIPs) != 2 || len(service.Spec.Ports) != 2 {
		return nil, fmt.Errorf("there are %d pods for %d nodes, and a service with %d addresses and %d ports for 2 and 2",
			len(pods), c.Nodes, len(service.Spec.ClusterIPs), len(service.Spec.Ports))
	}
	var all []string
	for _, p := range pods {
		all = append(all, p.Metadata.Name)
	}
	out := map[string][]call{}
	add := func(from string, prefix []string, to, host, port string, servers []string) {
		for _, proto := range []string{"tcp", "udp"} {
			target := net.JoinHostPort(host, port)
			out[from] = append(out[from], call{fmt.Sprintf("%s from %s to %s, %s", proto, from, to, target), prefix, proto, target, servers})
		}
	}
	for _, from := range pods {
		in := []string{c.bin("kubectl"), "--kubeconfig=" + c.Kubeconfig(), "-n", ns, "exec", from.Metadata.Name, "--", "pw-client"}
		name := "a pod on " + from.Spec.NodeName
		for _, to := range pods {
			if len(to.Status.PodIPs) != 2 {
				return nil, fmt.Errorf("pod %s has the addresses %v, not one of each family", to.Metadata.Name, to.Status.PodIPs)
			}
			for _, ip := range to.Status.PodIPs {
				add(name, in, "the pod on "+to.Spec.NodeName, ip.IP, "8080", []string{to.Metadata.Name})
			}
		}
		for _, ip := range service.Spec.ClusterIPs {
			add(name, in, "a ClusterIP", ip, "80", all)
		}
		add(name, in, "a name of DNS", "web."+ns+".svc."+domain, "80", all)
	}
	client := []string{filepath.Join(c.Tree, "bin", "pw-client")}
	for _, n := range c.nodes() {
		for _, ip := range []string{n.IP, n.IP6} {
			for _, p := range service.Spec.Ports {
				if p.NodePort == 0 {
					return nil, fmt.Errorf("the service has no NodePort for %s", p.Protocol)
				}
				target := net.JoinHostPort(ip, strconv.Itoa(p.NodePort))
				proto := strings.ToLower(p.Protocol)
				out["outside"] = append(out["outside"], call{fmt.Sprintf("%s from outside to the NodePort on %s, %s", proto, n.Name, target), client, proto, target, all})
			}
		}
	}
	return out, nil
}

// try calls until it is answered: a service takes its time to be everywhere.
func (c Config) try(ctx context.Context, call call) error {
	return until(ctx, call.what, "", "", time.Minute, func() error {
		args := append(slices.Clone(call.prefix), "send", "-proto", call.proto, "-timeout", "2s", call.target)
		cmd := c.Outside(ctx, args...)
		var said bytes.Buffer
		cmd.Stderr = &said
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%w: %s%s", err, out, said.String())
		}
		var sum probe.Summary
		if err := json.Unmarshal(out, &sum); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if sum.OK != 1 || sum.First == nil || sum.First.Reply == nil || !slices.Contains(call.servers, sum.First.Reply.Server) {
			return fmt.Errorf("not answered by %s: %s", strings.Join(call.servers, " or "), out)
		}
		return nil
	})
}
