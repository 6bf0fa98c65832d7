package endpoint_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/endpoint"
)

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
