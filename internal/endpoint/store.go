package endpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/podweir/podweir/internal/wholefile"
)

// phase says how far an endpoint's life has come.
type phase string

const (
	phaseCreating phase = "creating" // Add has not answered
	phaseReady    phase = "ready"
	phaseDeleting phase = "deleting"
)

// recordVersion is that of the files' layout.
const recordVersion = 1

// record is the content of an endpoint's file.
type record struct {
	Version  int      `json:"version"`
	Phase    phase    `json:"phase"`
	Endpoint Endpoint `json:"endpoint"`
}

// store keeps records and queued deletions on disk.
type store struct {
	endpoints, deletions, corrupt string
	step                          func(string) // never nil
}

func openStore(stateDir string, step func(string)) (*store, error) {
	if step == nil {
		step = func(string) {}
	}
	s := &store{
		step:      step,
		endpoints: filepath.Join(stateDir, "endpoints"),
		deletions: filepath.Join(stateDir, "deletions"),
		corrupt:   filepath.Join(stateDir, "corrupt"),
	}
	for _, dir := range []string{s.endpoints, s.deletions, s.corrupt} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("state folder: %w", err)
		}
	}
	return s, nil
}

// fileName is unambiguous: neither half of a key may contain a colon.
func fileName(k Key) string { return k.String() + ".json" }

func (s *store) put(r record) error {
	r.Version = recordVersion
	if err := s.write(s.endpoints, fileName(r.Endpoint.Key()), r, r.Phase == phaseReady); err != nil {
		return fmt.Errorf("state of %s: %w", r.Endpoint, err)
	}
	return nil
}

func (s *store) remove(k Key) error { return s.removeFile(s.endpoints, fileName(k)) }

func (s *store) unqueue(k Key) error { return s.removeFile(s.deletions, fileName(k)) }

// isQueued tells whether the deletion of k waits.
func (s *store) isQueued(k Key) bool {
	_, err := os.Lstat(filepath.Join(s.deletions, fileName(k)))
	return err == nil
}

// load returns the records that can be read; the others are moved to the
// corrupt folder and reported.
func (s *store) load() ([]record, []error) {
	var out []record
	errs := s.each(s.endpoints, func(name string, data []byte) error {
		var r record
		if err := json.Unmarshal(data, &r); err != nil {
			return err
		}
		if err := r.validate(name); err != nil {
			return err
		}
		out = append(out, r)
		return nil
	})
	return out, errs
}

func (r record) validate(name string) error {
	ep := r.Endpoint
	if r.Version != recordVersion {
		return fmt.Errorf("layout version %d is unknown; this program writes %d", r.Version, recordVersion)
	}
	if err := ep.Key().Validate(); err != nil {
		return err
	}
	if want := fileName(ep.Key()); want != name {
		return fmt.Errorf("the content belongs to %s", want)
	}
	switch r.Phase {
	case phaseCreating, phaseReady, phaseDeleting:
	default:
		return fmt.Errorf("unknown phase %q", r.Phase)
	}
	if ep.ID == 0 || len(ep.Addrs) == 0 || ep.HostIfName == "" || len(ep.MAC) != 6 || len(ep.HostMAC) != 6 {
		return errors.New("a required field is missing")
	}
	// What is removed later is removed by this name.
	if want := HostIfName(ep.Namespace, ep.Pod, ep.ContainerID, ep.IfName); ep.HostIfName != want {
		return fmt.Errorf("its host interface is %q and would be %s", ep.HostIfName, want)
	}
	for _, a := range ep.Addrs {
		if !a.IsValid() {
			return errors.New("an address is empty")
		}
	}
	_, err := portMappings(ep.PortMappings)
	return err
}

// setAside moves an endpoint's file to the corrupt folder.
func (s *store) setAside(name string) error {
	return os.Rename(filepath.Join(s.endpoints, name), filepath.Join(s.corrupt, name))
}

// queued returns the deletions that wait.
func (s *store) queued() ([]Key, []error) {
	var out []Key
	errs := s.each(s.deletions, func(name string, data []byte) error {
		var k Key
		if err := json.Unmarshal(data, &k); err != nil {
			return err
		}
		if err := k.Validate(); err != nil {
			return err
		}
		if want := fileName(k); want != name {
			return fmt.Errorf("the content belongs to %s", want)
		}
		out = append(out, k)
		return nil
	})
	return out, errs
}

// each calls f for every file of dir. What f refuses is set aside; what is
// left of an interrupted write is removed.
func (s *store) each(dir string, f func(name string, data []byte) error) []error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return []error{err}
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), tempPrefix) {
			errs = appendErr(errs, removeUnheld(path))
			continue
		}
		data, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = f(e.Name(), data)
		}
		if err != nil {
			aside := filepath.Join(s.corrupt, e.Name())
			errs = append(errs, fmt.Errorf("%s is corrupted and was moved to %s: %w", path, aside, err))
			errs = appendErr(errs, os.Rename(path, aside))
		}
	}
	return errs
}

func appendErr(errs []error, err error) []error {
	if err == nil {
		return errs
	}
	return append(errs, err)
}

// QueueDeletion leaves a note under stateDir that the endpoint k has to be
// removed, for [Manager.Restore] to find. It is what the plugin does while no
// agent answers. step, if not nil, is told how far it is.
func QueueDeletion(stateDir string, k Key, step func(string)) error {
	if err := k.Validate(); err != nil {
		return err
	}
	s, err := openStore(stateDir, step)
	if err != nil {
		return err
	}
	return s.write(s.deletions, fileName(k), k, true)
}

// UnqueueDeletion takes the note back; none is no error.
func UnqueueDeletion(stateDir string, k Key, step func(string)) error {
	s, err := openStore(stateDir, step)
	if err != nil {
		return err
	}
	return s.unqueue(k)
}

const tempPrefix = ".tmp-"

// write replaces a file with v as JSON: after a crash or with a full disk it
// has the old content or the new one. What is not durable may be lost with the
// machine's power: where the interfaces that it tells of go as well, nobody
// need wait for the disk.
func (s *store) write(dir, name string, v any, durable bool) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	f, err := createTemp(dir)
	if err != nil {
		return err
	}
	s.step("file made")
	_, err = f.Write(append(data, '\n'))
	s.step("file written")
	if err == nil && durable {
		err = f.Sync()
		s.step("file synced")
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()), f.Close())
	}
	s.step("file renamed")
	err = f.Close()
	if durable {
		err = errors.Join(err, wholefile.SyncDir(dir))
	}
	return err
}

// createTemp makes a file that is locked as long as its maker lives, so that
// [removeUnheld] knows what a killed one left. Whoever had the lock between
// the two steps may have removed it.
func createTemp(dir string) (*os.File, error) {
	for {
		f, err := os.CreateTemp(dir, tempPrefix)
		if err != nil {
			return nil, err
		}
		var st unix.Stat_t
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err == nil {
			err = unix.Fstat(int(f.Fd()), &st)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), os.Remove(f.Name()), f.Close())
		}
		if st.Nlink > 0 {
			return f, nil
		}
		_ = f.Close()
	}
}

// removeUnheld removes a temporary file, unless its maker is at it.
func removeUnheld(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	}
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remains of a write: %w", err)
	}
	return nil
}

// removeFile removes a file, if it is there. It may be there again after a loss
// of power, when what it tells of has gone.
func (s *store) removeFile(dir, name string) error {
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	s.step("file removed")
	return nil
}
