package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/kubeproxy"
)

// L4: what a kube-proxy left is a problem from the start on, and none when it
// is gone.
func TestLeftovers(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	b.done()
	b.await("the first round", func() bool { return b.a.full })
	ctx, cancel := context.WithCancel(t.Context())
	tick, ended := make(chan time.Time), make(chan struct{})
	found := make(chan kubeproxy.Leftovers, 1)
	failed := errors.New("no CAP_NET_ADMIN")
	fail := make(chan error, 1)
	look := func(l kubeproxy.Leftovers, err error) {
		found <- l
		fail <- err
	}
	go func() {
		defer close(ended)
		b.a.watchLeftovers(ctx, func(context.Context) (kubeproxy.Leftovers, error) { return <-found, <-fail }, tick)
	}()
	has := func(parts ...string) {
		t.Helper()
		b.await(strings.Join(parts, ", "), func() bool {
			var got []string
			for p := range b.tables.Problems.All(b.tables.DB.ReadTxn()) {
				if strings.Contains(p.Err, "kube-proxy") {
					got = append(got, p.Object+": "+p.Err)
				}
			}
			text := strings.Join(got, "\n")
			for _, p := range parts {
				if !strings.Contains(text, p) {
					return false
				}
			}
			return len(got) == len(parts)
		})
	}
	look(kubeproxy.Leftovers{
		Running: "process 7", Device: true,
		Tables: []kubeproxy.Table{{Kind: kubeproxy.IPTablesNFT, Family: "ip", Name: "nat", Chains: []string{"KUBE-SERVICES", "KUBE-SVC-X"}}},
	}, nil)
	has("kube-proxy: a kube-proxy runs on this node (process 7)", "iptables-nft, table ip nat, chain KUBE-SERVICES: rules", "Device kube-ipvs0: ")
	tick <- time.Time{}
	look(kubeproxy.Leftovers{Device: true}, failed)
	has("Device kube-ipvs0: ", "cannot be read: no CAP_NET_ADMIN")
	tick <- time.Time{}
	look(kubeproxy.Leftovers{}, nil)
	has()
	cancel()
	<-ended
}
