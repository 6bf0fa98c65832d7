package endpoint_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
)

// crash runs f until it reaches the given step and stops it there, as the
// death of the process would: nothing after it happens. It tells whether the
// step was reached.
func (b *bench) crash(at string, f func() error) (reached bool) {
	b.t.Helper()
	b.SetStep(func(step string) {
		if step == at {
			panic(errCrash)
		}
	})
	defer func() {
		if r := recover(); r != nil {
			if r != any(errCrash) {
				panic(r)
			}
			reached = true
		}
	}()
	if err := f(); err != nil {
		b.t.Error(err)
	}
	return false
}

var errCrash = errors.New("crash")

// steps are those of an operation, in order. What the writing of a file has for
// steps is left out: there a process has to die (see cmd/cni).
func (b *bench) steps(f func() error) []string {
	b.t.Helper()
	var out []string
	b.SetStep(func(step string) {
		if !strings.HasPrefix(step, "file ") {
			out = append(out, step)
		}
	})
	defer b.SetStep(nil)
	if err := f(); err != nil {
		b.t.Fatal(err)
	}
	if len(out) < 5 || len(slices.Compact(slices.Sorted(slices.Values(out)))) != len(out) {
		b.t.Fatalf("steps %q: too few, or not of different names", out)
	}
	return out
}

func TestCrashAnywhereInAddIsUndoneByRestart(t *testing.T) {
	b := newBench(t)
	first, _ := b.request("first")
	steps := b.steps(func() error { _, err := b.Add(t.Context(), first); return err })
	b.del(first)
	last := len(steps) - 1
	if steps[last] != "ready" {
		t.Fatalf("steps %q", steps)
	}
	for _, step := range steps[:last] {
		t.Run(step, func(t *testing.T) {
			req, _ := b.request("web", "10.244.80.65", "fd00:10:244:50::65")
			if !b.crash(step, func() error { _, err := b.Add(context.Background(), req); return err }) {
				t.Fatal("the step was not reached")
			}
			if err := b.restart(); err != nil {
				t.Error(err)
			}
			b.expectNothing()
			b.del(req)
			b.add(req)
			b.del(req)
			b.expectNothing()
		})
	}
	t.Run("ready", func(t *testing.T) {
		req, ns := b.request("web")
		if !b.crash("ready", func() error { _, err := b.Add(context.Background(), req); return err }) {
			t.Fatal("the step was not reached")
		}
		if err := b.restart(); err != nil {
			t.Error(err)
		}
		if err := b.Check(t.Context(), req); err != nil {
			t.Error(err)
		}
		b.expectTraffic(ns, b.List()[0])
		b.del(req)
		b.expectNothing()
	})
}

func TestCrashAnywhereInDelIsFinishedByRestart(t *testing.T) {
	b := newBench(t)
	first, _ := b.request("first")
	b.add(first)
	for _, step := range b.steps(func() error { return b.Del(t.Context(), first) }) {
		t.Run(step, func(t *testing.T) {
			req, _ := b.request("web")
			b.add(req)
			if !b.crash(step, func() error { return b.Del(context.Background(), req) }) {
				t.Fatal("the step was not reached")
			}
			if err := b.restart(); err != nil {
				t.Error(err)
			}
			if step == "locked" { // nothing is on disk yet: the runtime asks again
				b.del(req)
			}
			b.expectNothing()
			b.del(req)
		})
	}
}

func TestRestartKeepsEndpoints(t *testing.T) {
	b := newBench(t)
	req, ns := b.request("web")
	ep := b.add(req)
	b.fakes.Calls()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b.open()
	if got := b.List(); len(got) != 1 || fmt.Sprint(got[0]) != fmt.Sprint(ep) || got[0].MAC.String() != ep.MAC.String() ||
		got[0].HostMAC.String() != ep.HostMAC.String() || !slices.Equal(got[0].Addrs, ep.Addrs) || got[0].ID != ep.ID {
		t.Errorf("before Restore the list is %+v, want %+v", got, ep)
	}
	if calls := b.fakes.Calls(); len(calls) > 0 {
		t.Errorf("New called %v", calls)
	}
	expectCode(t, b.Status(), endpoint.CodeNotAvailable, "starting")

	// An Add that comes too early waits.
	other, _ := b.request("other")
	expired, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := b.Add(expired, other)
	expectCode(t, err, endpoint.CodeTryAgain, "starting")
	waiting := make(chan error, 1)
	go func() { _, err := b.Add(context.Background(), other); waiting <- err }()

	if err := b.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err != nil {
		t.Fatal(err)
	}
	if err := b.Status(); err != nil {
		t.Error(err)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	b.expectTraffic(ns, ep)
	if got := b.List()[1]; got.ID <= ep.ID || got.Addrs[0] == ep.Addrs[0] {
		t.Errorf("after a restart %s got id %d and %v", got, got.ID, got.Addrs)
	}
	b.del(req)
	b.del(other)
	b.expectNothing()
}

func TestEndpointsAreRemovedAfterAReboot(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("gone")
	b.add(req)
	kept, ns := b.request("kept")
	ep := b.add(kept)
	link, err := netlink.LinkByName(b.List()[0].HostIfName)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(link); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err != nil {
		t.Error(err)
	}
	if got := b.List(); len(got) != 1 || got[0].Pod != "kept" {
		t.Errorf("endpoints: %v", got)
	}
	b.expectTraffic(ns, ep)
	b.del(req)
	b.del(kept)
	b.expectNothing()
}

// A reboot counts interfaces anew: the index of a record's interface may be
// another device's, whose programs are none of the record's.
func TestRecordWhoseIndexIsAnothersByNow(t *testing.T) {
	b := newBench(t)
	gone, _ := b.request("gone")
	goneEp := b.add(gone)
	kept, ns := b.request("kept")
	keptEp := b.add(kept)
	link, err := netlink.LinkByName(goneEp.HostIfName)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkDel(link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(b.state, "endpoints", "c-gone:eth0.json")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	index := func(i int) string { return fmt.Sprintf(`"hostIfindex": %d`, i) }
	moved := strings.Replace(string(content), index(goneEp.HostIfindex), index(keptEp.HostIfindex), 1)
	if err := os.WriteFile(file, []byte(moved), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err != nil {
		t.Error(err)
	}
	if got := b.List(); len(got) != 1 || got[0].Pod != "kept" {
		t.Errorf("endpoints: %v", got)
	}
	if err := b.fakes.Attached(t.Context(), keptEp.HostIfindex); err != nil {
		t.Errorf("programs of the other pod: %v", err)
	}
	b.expectTraffic(ns, keptEp)
}

func TestCorruptedFileIsSetAside(t *testing.T) {
	b := newBench(t)
	bad, _ := b.request("bad")
	good, ns := b.request("good")
	badEp := b.add(bad)
	goodEp := b.add(good)
	file := filepath.Join(b.state, "endpoints", "c-bad:eth0.json")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	goodContent, err := os.ReadFile(filepath.Join(b.state, "endpoints", "c-good:eth0.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, data string }{
		{"empty", ""},
		{"cut", string(content[:len(content)/2])},
		{"noise", "\x00\xff\x00"},
		{"other key", strings.ReplaceAll(string(content), "c-bad", "c-other")},
		{"version", strings.Replace(string(content), `"version": 1`, `"version": 7`, 1)},
		{"another's interface", strings.Replace(string(content), badEp.HostIfName, goodEp.HostIfName, 1)},
		{"no interface of ours", strings.Replace(string(content), badEp.HostIfName, "eth0", 1)},
		{"no address", strings.Replace(string(content), badEp.Addrs[0].String(), "", 1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(c.data), 0o600); err != nil {
				t.Fatal(err)
			}
			half := filepath.Join(b.state, "endpoints", ".tmp-123")
			if err := os.WriteFile(half, content[:10], 0o600); err != nil {
				t.Fatal(err)
			}
			err := b.restart()
			if err == nil || !strings.Contains(err.Error(), "c-bad") || !strings.Contains(err.Error(), badEp.HostIfName) {
				t.Errorf("Restore reports %v", err)
			}
			if got := b.List(); len(got) != 1 || got[0].Pod != "good" {
				t.Fatalf("endpoints: %v", got)
			}
			b.expectTraffic(ns, goodEp)
			if got := b.files(); len(got) != 1 {
				t.Errorf("files: %v", got)
			}
			if _, err := os.Stat(filepath.Join(b.state, "corrupt", "c-bad:eth0.json")); err != nil {
				t.Error(err)
			}
			// The lost pod's addresses are still routed to it.
			wants, _ := b.request("wants", badEp.Addrs[0].String())
			_, err = b.Add(t.Context(), wants)
			expectCode(t, err, endpoint.CodeAddress, badEp.HostIfName)
		})
	}
	// Its DEL, which names the pod, removes the interface and frees them.
	b.del(bad)
	wants, _ := b.request("wants", badEp.Addrs[0].String())
	b.add(wants)
	b.del(wants)

	// Two files that claim one interface: one of them wins.
	twice := strings.ReplaceAll(string(goodContent), "c-good", "c-bad")
	if err := os.WriteFile(file, []byte(twice), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err == nil || !strings.Contains(err.Error(), goodEp.HostIfName) {
		t.Errorf("Restore reports %v", err)
	}
	b.expectTraffic(ns, goodEp)
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	for _, l := range hostLinks(t) {
		t.Errorf("%s is left", l.Attrs().Name)
	}
}

func TestQueuedDeletionsAreReplayed(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	b.add(req)
	kept, _ := b.request("kept")
	b.add(kept)
	for _, k := range []endpoint.Key{req.Key(), {ContainerID: "never-added", IfName: "eth0"}} {
		if err := endpoint.QueueDeletion(b.state, k, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := endpoint.QueueDeletion(b.state, endpoint.Key{ContainerID: "../../x", IfName: "eth0"}, nil); err == nil {
		t.Error("a key that leads out of the folder was queued")
	}
	if err := os.WriteFile(filepath.Join(b.state, "deletions", "x.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err == nil || !strings.Contains(err.Error(), "x.json") {
		t.Errorf("Restore reports %v", err)
	}
	if got := b.files(); !slices.Equal(got, []string{"endpoints/c-kept:eth0.json"}) {
		t.Errorf("files: %v", got)
	}
	if got := b.List(); len(got) != 1 || got[0].Pod != "kept" {
		t.Errorf("endpoints: %v", got)
	}
	b.del(kept)
	b.expectNothing()
}

// Whoever queues a deletion while the agent runs, as it could not be reached,
// need not wait for its next start.
func TestQueuedDeletionsAreRepaired(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	b.add(req)
	for _, k := range []endpoint.Key{req.Key(), {ContainerID: "never-added", IfName: "eth0"}} {
		if err := endpoint.QueueDeletion(b.state, k, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Repair(t.Context()); err != nil {
		t.Error(err)
	}
	b.expectNothing()
	// A note from before ADD is none about what was added.
	if err := endpoint.QueueDeletion(b.state, req.Key(), nil); err != nil {
		t.Fatal(err)
	}
	b.add(req)
	if _, err := b.Repair(t.Context()); err != nil {
		t.Error(err)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	// Nor is one that such an ADD dropped after it was read.
	if err := endpoint.QueueDeletion(b.state, req.Key(), nil); err != nil {
		t.Fatal(err)
	}
	b.SetStep(func(step string) {
		if step == "locked" {
			if err := endpoint.UnqueueDeletion(b.state, req.Key(), nil); err != nil {
				t.Error(err)
			}
		}
	})
	if _, err := b.Repair(t.Context()); err != nil {
		t.Error(err)
	}
	b.SetStep(nil)
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	b.del(req)
	b.expectNothing()
}

// What a killed plugin left of a note goes; what one that lives is writing
// stays.
func TestRemainsOfANote(t *testing.T) {
	b := newBench(t)
	name := filepath.Join(b.state, "deletions", ".tmp-1")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Repair(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(name); err != nil {
		t.Errorf("the file of one who lives: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Repair(t.Context()); err != nil {
		t.Error(err)
	}
	b.expectNothing()
}

// GC is about what there is when it is asked for: neither an addition under
// way, nor what a runtime makes anew meanwhile.
func TestGCLeavesWhatComesMeanwhile(t *testing.T) {
	b := newBench(t)
	var reqs [2]endpoint.Request
	for i := range reqs {
		reqs[i], _ = b.request(fmt.Sprintf("pod-%d", i))
		b.add(reqs[i])
	}
	again := -1
	b.fakes.Hook = func(_ context.Context, call string, ep endpoint.Endpoint) error {
		if call != "down" || again >= 0 {
			return nil
		}
		again = 0
		if ep.Pod == "pod-0" {
			again = 1
		}
		b.del(reqs[again])
		b.add(reqs[again])
		return nil
	}
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	b.fakes.Hook = nil
	if got := b.List(); len(got) != 1 || got[0].Key() != reqs[again].Key() {
		t.Errorf("endpoints: %v, want that of %v", got, reqs[again].Key())
	}
	b.del(reqs[again])
	b.expectNothing()

	b.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		if call == "attach" || call == "up" {
			return b.GC(ctx, "", nil)
		}
		return nil
	}
	b.add(reqs[0])
	b.fakes.Hook = nil
	if err := b.Check(t.Context(), reqs[0]); err != nil {
		t.Error(err)
	}
	b.del(reqs[0])
	b.expectNothing()
}

// An interface whose state is lost keeps its addresses until it is gone: then
// GC gives them back.
func TestGCForgetsInterfacesWithoutState(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("lost")
	ep := b.add(req)
	if err := os.Remove(filepath.Join(b.state, "endpoints", "c-lost:eth0.json")); err != nil {
		t.Fatal(err)
	}
	if err := b.restart(); err == nil || !strings.Contains(err.Error(), ep.HostIfName) {
		t.Errorf("Restore reports %v", err)
	}
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	if _, held := b.ipam.Owner(ep.Addrs[0]); !held {
		t.Errorf("%s would be given away while the host routes it to %s", ep.Addrs[0], ep.HostIfName)
	}
	b.deleteLinks()
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	if owner, held := b.ipam.Owner(ep.Addrs[0]); held {
		t.Errorf("%s is held by %s still", ep.Addrs[0], owner)
	}
}

// A pod whose Pod object has gone has no policy to wait for. Its DEL does not
// wait for that, whatever a repair does meanwhile.
func TestDelDoesNotWaitForPolicy(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	b.add(req)
	never := errors.New("the Pod object is gone")
	waits := make(chan struct{}, 8)
	b.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		if call != "up" {
			return nil
		}
		select {
		case waits <- struct{}{}:
		default:
		}
		<-ctx.Done()
		return never
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b.open()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.Restore(ctx) }()
	<-waits
	other, _ := b.request("other")
	b.del(other) // nothing to do with it
	cancel()
	if err := <-done; !errors.Is(err, never) {
		t.Errorf("Restore reports %v", err)
	}
	expectCode(t, statusOf(b, nil), endpoint.CodeLimited, "default/web")
	go func() { _, err := b.Repair(context.Background()); done <- err }()
	<-waits
	b.del(req) // with no time limit at all
	<-done
	b.fakes.Hook = nil
	b.expectNothing()

	// Nor for one that starts, which may wait for long.
	b.add(req)
	b.fakes.Hook = func(ctx context.Context, call string, _ endpoint.Endpoint) error {
		if call == "up" {
			close(waits)
			<-ctx.Done()
			return context.Cause(ctx)
		}
		return nil
	}
	waits = make(chan struct{})
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b.open()
	go func() { done <- b.Restore(context.Background()) }()
	<-waits
	b.del(req)
	if err := <-done; err != nil {
		t.Errorf("Restore reports %v", err)
	}
	b.fakes.Hook = nil
	b.expectNothing()
}

// statusOf is what b says with these ranges.
func statusOf(b *bench, cidrs []netip.Prefix) error {
	b.t.Helper()
	before := b.ipam.CIDRs()
	if err := b.ipam.SetCIDRs(cidrs); err != nil {
		b.t.Fatal(err)
	}
	err := b.Status()
	if err := b.ipam.SetCIDRs(before); err != nil {
		b.t.Fatal(err)
	}
	return err
}

func TestGC(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("stale")
	b.add(req)
	kept, _ := b.request("kept")
	b.add(kept)
	other, _ := b.request("other")
	other.Network = "other"
	b.add(other)
	if err := b.GC(t.Context(), "", []endpoint.Key{kept.Key(), {ContainerID: "unknown", IfName: "eth0"}}); err != nil {
		t.Fatal(err)
	}
	if got := b.List(); len(got) != 2 || got[0].Pod != "kept" || got[1].Pod != "other" {
		t.Errorf("endpoints: %v", got)
	}
	for _, network := range []string{"", "other"} {
		if err := b.GC(t.Context(), network, nil); err != nil {
			t.Fatal(err)
		}
	}
	b.expectNothing()
}

// fullDisk gives b a state folder of 64 KiB, and functions that fill and empty
// it.
func fullDisk(t *testing.T, b *bench) (fill, empty func()) {
	t.Helper()
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	b.state = small
	if err := b.restart(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(small, "fill")
	return func() {
			t.Helper()
			if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
				t.Fatalf("filling the disk: %v", err)
			}
		}, func() {
			t.Helper()
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
}

func TestFullDisk(t *testing.T) {
	b := newBench(t)
	fill, empty := fullDisk(t, b)
	before, _ := b.request("before")
	b.add(before)
	fill()
	req, _ := b.request("late")
	_, err := b.Add(t.Context(), req)
	expectCode(t, err, endpoint.CodeIO, "no space left", "default/late")
	if got := b.files(); !slices.Equal(got, []string{"endpoints/c-before:eth0.json"}) {
		t.Errorf("files: %v", got)
	}
	if err := b.Check(t.Context(), before); err != nil {
		t.Error(err)
	}
	if err := b.restart(); err != nil {
		t.Errorf("a restart: %v", err)
	}
	if err := endpoint.QueueDeletion(b.state, req.Key(), nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a note: %v", err)
	}
	if got := b.files(); !slices.Equal(got, []string{"endpoints/c-before:eth0.json"}) {
		t.Errorf("files: %v", got)
	}
	b.del(before) // works without space
	b.expectNothing()
	empty()
	b.add(req)
	b.del(req)
	b.expectNothing()
}

// The disk fills up at every step of ADD, and of DEL.
func TestDiskFillsUp(t *testing.T) {
	b := newBench(t)
	fill, empty := fullDisk(t, b)
	req, _ := b.request("web")
	add := func() error { _, err := b.Add(t.Context(), req); return err }
	adds := b.steps(add)
	dels := b.steps(func() error { return b.Del(t.Context(), req) })
	at := func(step string, f func() error) error {
		b.SetStep(func(s string) {
			if s == step {
				fill()
			}
		})
		defer b.SetStep(nil)
		return f()
	}
	refused := 0
	for _, step := range adds {
		err := at(step, add)
		if err != nil {
			refused++
			expectCode(t, err, endpoint.CodeIO, "no space left", "default/web")
			b.expectNothing()
		} else {
			if err := b.Check(t.Context(), req); err != nil {
				t.Errorf("%s: %v", step, err)
			}
			b.del(req)
		}
		empty()
		if err := b.restart(); err != nil {
			t.Error(err)
		}
		b.expectNothing()
	}
	if refused < len(adds)-2 { // all but the last, when the file is there
		t.Errorf("%d of %q were refused", refused, adds)
	}
	for _, step := range dels {
		b.add(req)
		if err := at(step, func() error { return b.Del(t.Context(), req) }); err != nil {
			t.Errorf("DEL, full from %q on: %v", step, err)
		}
		b.expectNothing()
		empty()
	}
}
