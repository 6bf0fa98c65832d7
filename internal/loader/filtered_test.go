package loader

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
)

// from_pod_judge takes the place of from_pod on its very hook, is there after
// restarts and goes again; to_pod, and others' programs, see nothing of it.
func TestFilterPod(t *testing.T) {
	modes(t, func(t *testing.T, cfg Config) {
		ctx := context.Background()
		pod, over := veth(t, "pwpod"), veth(t, "pwover")
		d := load(t, cfg)
		must(t, d.AttachPod(ctx, pod, "pwpod"))
		before, to := one(t, cfg, pod, false, "from_pod"), one(t, cfg, pod, true, "to_pod")
		is := func(what, name string) {
			t.Helper()
			got := one(t, cfg, pod, false, name)
			if got.link != before.link {
				t.Errorf("%s: %s is on the hook in another link", what, name)
			}
			if now := one(t, cfg, pod, true, "to_pod"); now.link != to.link {
				t.Errorf("%s: to_pod is in another link", what)
			}
			if !cfg.ForceClsact && !slices.Contains(ls(t, linksDir(cfg.BPFFS)), fmt.Sprintf("%d-%s", pod, name)) {
				t.Errorf("%s: pinned are %v", what, ls(t, linksDir(cfg.BPFFS)))
			}
			if repaired, err := d.Verify(ctx); err != nil || len(repaired) != 0 {
				t.Errorf("%s: repaired %q, %v", what, repaired, err)
			}
			want := []int(nil)
			if name == "from_pod_judge" {
				want = []int{pod}
			}
			if got := d.Filtered(); !slices.Equal(got, want) {
				t.Errorf("%s: filtered are %v, want %v", what, got, want)
			}
		}
		for range 2 {
			for range 2 {
				must(t, d.FilterPod(ctx, pod, "pwpod", true))
				is("on", "from_pod_judge")
				must(t, d.AttachPod(ctx, pod, "pwpod"))
				is("attached again", "from_pod_judge")
			}
			must(t, d.AttachCover(ctx, over, "pwover"))
			one(t, cfg, over, false, "from_pod_send")
			d = restart(t, d)
			must(t, d.AttachPod(ctx, pod, "pwpod"))
			is("restart", "from_pod_judge")
			must(t, d.SetOverlay(ctx, d.cfg.OverlayIfindex+7))
			is("another load", "from_pod_judge")
			must(t, d.AttachCover(ctx, over, "pwover"))
			one(t, cfg, over, false, "from_pod_send")
			for range 2 {
				must(t, d.FilterPod(ctx, pod, "pwpod", false))
				is("off", "from_pod")
			}
		}
		// Not attached, or detached by another meanwhile.
		detachForeignly(t, cfg, d, pod)
		must(t, d.FilterPod(ctx, pod, "pwpod", true))
		one(t, cfg, pod, false, "from_pod_judge")
		// A device that is gone.
		removeDevice(t, "pwpod")
		must(t, d.FilterPod(ctx, pod, "pwpod", false))
		if got := d.Filtered(); len(got) != 0 {
			t.Errorf("filtered are %v", got)
		}
		must(t, d.Maps().Filtered.Put(1, 2))
		must(t, d.Close())
		must(t, Cleanup(cfg.BPFFS))
		if _, err := os.Stat(cfg.BPFFS); err == nil {
			t.Error("cleanup has left the folder")
		}
		if got := onHook(t, cfg, over, false); len(got) != 0 {
			t.Errorf("cleanup has left %v", got)
		}
	})
}
