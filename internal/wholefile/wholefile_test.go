package wholefile_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/podweir/podweir/internal/wholefile"
)

func expect(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil || string(data) != content {
		t.Errorf("%s has %q (%v), want %q", path, data, err, content)
	}
	if fi, err := os.Stat(path); err == nil && fi.Mode().Perm() != mode {
		t.Errorf("%s has mode %v, want %v", path, fi.Mode().Perm(), mode)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("in the folder: %v (%v), want the file alone", entries, err)
	}
}

func TestWrite(t *testing.T) {
	for name, how := range map[string]wholefile.How{
		"plain":   {Mode: 0o644},
		"durable": {Mode: 0o600, Durable: true},
		"beside":  {Mode: 0o755, Temp: filepath.Join(t.TempDir(), "temp-*")},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			for _, content := range []string{"first", "2nd"} {
				err := wholefile.Write(path, how, func(w io.Writer) error {
					if how.Temp != "" {
						if made, _ := filepath.Glob(how.Temp); len(made) != 1 {
							t.Errorf("temporary files: %v", made)
						}
					}
					return wholefile.Bytes([]byte(content))(w)
				})
				if err != nil {
					t.Fatal(err)
				}
				expect(t, path, content, how.Mode)
			}
			broken := errors.New("broken")
			err := wholefile.Write(path, how, func(w io.Writer) error {
				// As it was, as long as this lasts.
				if data, err := os.ReadFile(path); err != nil || string(data) != "2nd" {
					t.Errorf("meanwhile: %q, %v", data, err)
				}
				_, _ = w.Write([]byte("half"))
				return broken
			})
			if !errors.Is(err, broken) {
				t.Errorf("error %v, want what filling it said", err)
			}
			expect(t, path, "2nd", how.Mode)
		})
	}
}

// What cannot be put in its place leaves nothing.
func TestWriteToFolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := wholefile.Write(path, wholefile.How{Mode: 0o600}, wholefile.Bytes(nil)); err == nil {
		t.Error("a folder was replaced by a file")
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
		t.Errorf("left: %v, %v", entries, err)
	}
}
