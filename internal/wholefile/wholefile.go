package wholefile

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// How a file is written.
type How struct {
	// Temp is the temporary file's path, with a "*" for what makes its name
	// unique, in the same file system. Empty: a hidden name beside the file.
	Temp    string
	Mode    fs.FileMode
	Durable bool
}

// Write replaces the file at path by what fill writes.
func Write(path string, how How, fill func(io.Writer) error) error {
	temp := how.Temp
	if temp == "" {
		temp = filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	}
	f, err := os.CreateTemp(filepath.Dir(temp), filepath.Base(temp))
	if err != nil {
		return err
	}
	err = errors.Join(fill(f), f.Chmod(how.Mode))
	if how.Durable {
		err = errors.Join(err, f.Sync())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if how.Durable {
		return SyncDir(filepath.Dir(path))
	}
	return nil
}

// Bytes are what a file is filled with.
func Bytes(data []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	}
}

// SyncDir waits until the names of a folder are on the disk.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
