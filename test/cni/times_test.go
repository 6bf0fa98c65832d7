package cni

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/podweir/podweir/test/cluster"
)

var (
	adds     = flag.Int("adds", 5, "how many pods TestCNI adds one after another to say how long ADD takes")
	addsOnce = flag.Int("adds-at-once", 5, "how many it adds at once")
)

// times says how long ADD takes by the plugin's own log, and decides nothing.
func (w *world) times() {
	n := w.c.Node("node-a")
	before := w.traces(n)
	for _, c := range []struct {
		what  string
		count int
		limit int // at a time
	}{{"one after another", *adds, 1}, {"at once", *addsOnce, *addsOnce}} {
		pods := make([]*cluster.Pod, c.count)
		for i := range pods {
			obj := object(fmt.Sprintf("timed-%d", i), "node-a")
			w.must(w.c.Manifests.Put(obj))
			var err error
			pods[i], err = w.c.NewSandbox(obj)
			w.must(err)
		}
		took := make([]time.Duration, c.count)
		errs := make([]error, c.count)
		var wg sync.WaitGroup
		slots := make(chan struct{}, c.limit)
		for i, p := range pods {
			slots <- struct{}{}
			wg.Go(func() {
				took[i], errs[i] = w.timedAdd(p)
				<-slots
			})
		}
		wg.Wait()
		for i, p := range pods {
			w.must(errs[i])
			w.remove(p)
		}
		slices.Sort(took)
		w.Logf("ADD of %d pods %s: p50 %v, p99 %v, all from %v to %v", c.count, c.what,
			took[c.count/2], took[c.count*99/100], took[0], took[c.count-1])
	}
	w.baseline(n, before)
}

// timedAdd calls the plugin and returns what it says that it took.
func (w *world) timedAdd(p *cluster.Pod) (time.Duration, error) {
	bin, err := cluster.BinDir()
	if err != nil {
		return 0, err
	}
	conf := fmt.Sprintf(`{"cniVersion":"1.1.0","name":"podweir","type":"podweir-cni","socket":%q,"stateDir":%q,"logLevel":"info"}`,
		p.Node.Socket(), p.Node.StateDir())
	text, err := p.Node.Exec(w.ctx, "env", "CNI_COMMAND=ADD", "CNI_CONTAINERID="+p.ContainerID, "CNI_IFNAME=eth0", "CNI_NETNS="+p.Path(),
		"CNI_ARGS=K8S_POD_NAMESPACE="+p.Namespace+";K8S_POD_NAME="+p.PodName+";K8S_POD_UID="+p.UID, "CNI_PATH="+bin,
		"sh", "-c", "echo '"+conf+"' | "+bin+"/podweir-cni 2>&1 >/dev/null")
	if err != nil {
		return 0, err
	}
	for word := range strings.FieldsSeq(text) {
		if value, ok := strings.CutPrefix(word, "took="); ok {
			return time.ParseDuration(value)
		}
	}
	return 0, fmt.Errorf("the plugin does not say what it took: %q", text)
}
