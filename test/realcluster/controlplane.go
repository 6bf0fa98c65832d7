package realcluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// part is a process of the control plane.
type part struct {
	name  string
	ready string // URL
	args  []string
}

func (c Config) parts() []part {
	pki := func(f string) string { return c.cp("pki", f) }
	same := func(name string) []string {
		kc := c.kubeconfig(name)
		return []string{"--kubeconfig=" + kc, "--authentication-kubeconfig=" + kc, "--authorization-kubeconfig=" + kc,
			"--bind-address=127.0.0.1", "--leader-elect=false"}
	}
	return []part{
		{"etcd", "http://127.0.0.1:2379/readyz", []string{
			"--name=podweir", "--data-dir=" + c.cp("etcd"), "--unsafe-no-fsync",
			"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
			"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
			"--initial-cluster=podweir=http://127.0.0.1:2380"}},
		{"kube-apiserver", "https://127.0.0.1:6443/readyz", []string{
			"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--advertise-address=" + hostIP,
			"--tls-cert-file=" + pki("apiserver.crt"), "--tls-private-key-file=" + pki("apiserver.key"), "--client-ca-file=" + pki("ca.crt"),
			"--kubelet-client-certificate=" + pki("apiserver-kubelet.crt"), "--kubelet-client-key=" + pki("apiserver-kubelet.key"),
			"--kubelet-certificate-authority=" + pki("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
			"--service-account-issuer=https://kubernetes.default.svc." + domain,
			"--service-account-key-file=" + pki("sa.pub"), "--service-account-signing-key-file=" + pki("sa.key"),
			"--requestheader-client-ca-file=" + pki("ca.crt"), "--requestheader-allowed-names=front-proxy-client",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-group-headers=X-Remote-Group", "--requestheader-username-headers=X-Remote-User",
			"--proxy-client-cert-file=" + pki("front-proxy.crt"), "--proxy-client-key-file=" + pki("front-proxy.key"),
			"--service-cluster-ip-range=" + svcCIDRs, "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
			"--audit-policy-file=" + c.cp("audit.yaml"), "--audit-log-path=" + c.AuditLog(), "--audit-log-maxsize=100"}},
		{"kube-controller-manager", "https://127.0.0.1:10257/healthz", append(same("controller-manager"),
			"--use-service-account-credentials", "--root-ca-file="+pki("ca.crt"), "--service-account-private-key-file="+pki("sa.key"),
			"--cluster-signing-cert-file="+pki("ca.crt"), "--cluster-signing-key-file="+pki("ca.key"),
			"--allocate-node-cidrs", "--cluster-cidr="+podCIDRs, "--service-cluster-ip-range="+svcCIDRs)},
		{"kube-scheduler", "https://127.0.0.1:10259/healthz", same("scheduler")},
	}
}

// auditPolicy has the API server write down what podweir's agents ask it, which
// is held against what they may.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted]
rules:
  - {level: Metadata, users: ["system:serviceaccount:kube-system:podweir-agent"]}
  - {level: None}
`

func (c Config) record(p part) string { return c.cp("run", p.name) }
func (c Config) log(p part) string    { return c.cp("log", p.name) }

// startPart starts one process and waits until it serves.
func (c Config) startPart(ctx context.Context, p part) error {
	if running(c.record(p)) == 0 {
		cmd := c.Outside(context.Background(), append([]string{c.bin(p.name)}, p.args...)...)
		done, err := inCgroup(cmd, c.cgroup())
		if err != nil {
			return err
		}
		defer done()
		if err := startProcess(c.record(p), c.log(p), cmd); err != nil {
			return err
		}
	}
	pair, err := tls.LoadX509KeyPair(c.cp("pki", "admin.crt"), c.cp("pki", "admin.key"))
	if err != nil {
		return err
	}
	return until(ctx, p.name, c.record(p), c.log(p), 2*time.Minute, func() error { return get(ctx, c.host(), p.ready, pair) })
}

func (c Config) startControlPlane(ctx context.Context, step func(string, ...any)) error {
	if err := os.MkdirAll(filepath.Join(cgroupRoot, "unified", c.cgroup()), 0o755); err != nil {
		return err
	}
	if _, err := os.Stat(c.Kubeconfig()); err != nil {
		if err := os.MkdirAll(c.cp(), 0o700); err != nil {
			return err
		}
		if err := c.certificates(); err != nil {
			return fmt.Errorf("certificates: %w", err)
		}
	}
	if err := os.WriteFile(c.cp("audit.yaml"), []byte(auditPolicy), 0o644); err != nil {
		return err
	}
	for _, p := range c.parts() {
		if err := c.startPart(ctx, p); err != nil {
			return err
		}
		step("%s is ready", p.name)
	}
	return nil
}

func (c Config) stopControlPlane(ctx context.Context) error {
	var errs []error
	parts := c.parts()
	for i := range parts {
		// The last first: nobody waits for one that has gone.
		errs = append(errs, stopProcess(c.record(parts[len(parts)-1-i]), 3*time.Second))
	}
	return errors.Join(append(errs, removeCgroups(ctx, c.cgroup()))...)
}
