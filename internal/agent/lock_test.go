package agent

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestLockFolders(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	missing := filepath.Join(a, "missing")
	unlock, err := lockFolders(a, b, missing)
	if err != nil {
		t.Fatal(err)
	}
	// One shared folder is enough, and nothing else stays locked.
	c := t.TempDir()
	if _, err := lockFolders(c, b); err == nil || !strings.Contains(err.Error(), b) {
		t.Fatalf("a folder was locked twice, or the error does not name it: %v", err)
	}
	other, err := lockFolders(c)
	if err != nil {
		t.Fatalf("a failed lock kept another folder: %v", err)
	}
	other()
	unlock()
	again, err := lockFolders(a, b)
	if err != nil {
		t.Fatalf("not given back: %v", err)
	}
	again()
}
