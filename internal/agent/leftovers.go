package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/podweir/podweir/internal/kubeproxy"
	"github.com/podweir/podweir/internal/table"
)

// leftoversEvery is how often what a kube-proxy may have left is looked for. A
// node that it did not go from has tens of thousands of chains.
const leftoversEvery = time.Minute

// watchLeftovers keeps a problem for everything that a kube-proxy has left on
// this node, from the start on until it is gone. Each tick is another look.
func (a *Agent) watchLeftovers(ctx context.Context, find func(context.Context) (kubeproxy.Leftovers, error), tick <-chan time.Time) {
	for {
		left, err := find(ctx)
		if ctx.Err() != nil {
			return
		}
		var list []table.Problem
		for _, t := range left.Troubles() {
			list = append(list, table.Problem{Object: t.Object, Err: t.Text + "; " + t.WayOut})
		}
		if err != nil {
			list = append(list, problems("", fmt.Errorf("what a kube-proxy may have left cannot be read: %w", err))...)
		}
		_ = a.do(ctx, func() { // the loop ends with ctx
			a.problems["leftovers of kube-proxy"] = list
			if a.full { // the first round publishes them otherwise
				a.publish()
			}
		})
		select {
		case <-ctx.Done():
			return
		case <-tick:
		}
	}
}
