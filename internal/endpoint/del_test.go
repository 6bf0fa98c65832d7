package endpoint_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
)

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
