package main

import (
	"context"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestBadFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--mark 0", "one single bit"},
		{"--mark 0x3000", "one single bit"},
		{"--mark 0x4000", "kube-proxy"},
		{"--mtu 1000", "1280"},
		{"--service-cidr 10.96.0.0", "no range"},
		{"--service-cidr 10.96.1.0/12", "10.96.0.0/12"},
		{"--log-level loud", "debug, info, warn or error"},
		{"--log-format xml", "text or json"},
		{"--manifests /m --kubeconfig /k", "exclude each other"},
		{"--socket=", "--socket is empty"},
		{"--routing-mode bird", "vxlan, cross-subnet, direct"},
		{"--healthz-bind-address 10256", "ADDRESS:PORT"},
		{"--metrics-bind-address 127.0.0.1:99999", "--metrics-bind-address"},
		{"--healthz-bind-address localhost:10256", "must be ADDRESS:PORT"},
		{"extra", "unknown command"},
		{"cleanup extra", "unknown command"},
		{"cleanup --log-level loud", "debug, info, warn or error"},
	} {
		cmd := command()
		cmd.SetArgs(strings.Fields(c.args))
		if err := cmd.ExecuteContext(context.Background()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v does not say %q", c.args, err, c.want)
		}
	}
}

func TestFlagDefaults(t *testing.T) {
	f := flags{serviceCIDRs: []string{"10.96.0.0/12", " fd00:10:98::/112"}, logLevel: "info", logFormat: "json", mode: "vxlan"}
	f.Mark, f.BPFFS, f.StateDir, f.Socket = 0x1000, "bpf", "/var/lib/podweir", "/run/podweir/agent.sock"
	if err := f.complete(); err != nil {
		t.Fatal(err)
	}
	want := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10:98::/112")}
	if !slices.Equal(f.ServiceCIDRs, want) || f.NodeName == "" || f.Log == nil || f.Version == "" || !filepath.IsAbs(f.BPFFS) {
		t.Errorf("%+v", f.Config)
	}
}
