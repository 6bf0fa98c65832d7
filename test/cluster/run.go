package cluster

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// RunRoot holds one folder per run.
const RunRoot = "/run/podweir-test"

// Run is one cluster, running or left behind.
type Run struct {
	ID      string    `json:"id"`
	Label   string    `json:"label"`
	PID     int       `json:"pid"`   // owner
	Start   uint64    `json:"start"` // when the owner started, so that a reused pid is not taken for it
	Kept    bool      `json:"kept"`  // outlives its owner until someone removes it
	Created time.Time `json:"created"`
}

func (r Run) dir() string    { return filepath.Join(RunRoot, r.ID) }
func (r Run) prefix() string { return "pw-" + r.ID + "-" }

// Runs lists the runs on this machine, oldest first.
func Runs() ([]Run, error) {
	entries, err := os.ReadDir(RunRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var runs []Run
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") { // about to be created
			continue
		}
		data, err := os.ReadFile(filepath.Join(RunRoot, e.Name(), "run.json"))
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		var r Run
		if err := json.Unmarshal(data, &r); err != nil {
			return nil, fmt.Errorf("run %s: %w; remove its namespaces and folder by hand", e.Name(), err)
		}
		if r.ID != e.Name() {
			return nil, fmt.Errorf("run %s calls itself %q; remove its namespaces and folder by hand", e.Name(), r.ID)
		}
		runs = append(runs, r)
	}
	slices.SortFunc(runs, func(a, b Run) int { return a.Created.Compare(b.Created) })
	return runs, nil
}

// newRun records a run before anything of it exists.
func newRun(label string) (Run, error) {
	id := make([]byte, 3)
	if _, err := rand.Read(id); err != nil {
		return Run{}, err
	}
	start, _ := processStart(os.Getpid())
	r := Run{ID: hex.EncodeToString(id), Label: label, PID: os.Getpid(), Start: start, Created: time.Now()}
	tmp := filepath.Join(RunRoot, ".new-"+r.ID)
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return Run{}, err
	}
	if err := r.save(tmp); err != nil {
		return Run{}, err
	}
	return r, os.Rename(tmp, r.dir())
}

func (r Run) save(dir string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, ".run.json")
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, "run.json"))
}

// alive says whether the process that owns the run still exists.
func (r Run) alive() bool {
	start, err := processStart(r.PID)
	return err == nil && start == r.Start
}

// processStart is field 22 of /proc/PID/stat.
func processStart(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(data), ") ") // the name may hold spaces
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return 0, fmt.Errorf("unexpected /proc/%d/stat", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// Sweep removes what runs left behind whose owner is gone, kept ones aside.
func Sweep() error {
	runs, err := Runs()
	for _, r := range runs {
		if !r.Kept && !r.alive() {
			err = errors.Join(err, r.Remove())
		}
	}
	return err
}

// Remove ends the run's processes and removes its namespaces, mounts,
// cgroups and folder. Repeating it is harmless.
func (r Run) Remove() error {
	if r.ID == "" {
		return errors.New("remove a run without id")
	}
	root, err := cgroupRoot()
	if err == nil {
		err = removeCgroup(filepath.Join(root, "podweir-test", r.ID))
		// The common parent goes with the last run.
		_ = os.Remove(filepath.Join(root, "podweir-test"))
	}
	names, rerr := os.ReadDir(netnsDir)
	if rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	for _, n := range names {
		if strings.HasPrefix(n.Name(), r.prefix()) {
			err = errors.Join(err, removeNetns(n.Name()))
		}
	}
	mounts, merr := mountsBelow(r.dir() + "/")
	err = errors.Join(err, merr)
	for _, m := range slices.Backward(mounts) {
		if uerr := unix.Unmount(m, unix.MNT_DETACH); uerr != nil {
			err = errors.Join(err, fmt.Errorf("unmount %s: %w", m, uerr))
		}
	}
	if err != nil { // the record stays, so that a later sweep tries again
		return fmt.Errorf("remove run %s: %w", r.ID, err)
	}
	if err := os.RemoveAll(r.dir()); err != nil {
		return err
	}
	_ = os.Remove(RunRoot) // only when it is empty
	return nil
}

// cgroupRoot is where the cgroup v2 hierarchy is mounted.
func cgroupRoot() (string, error) {
	var root string
	err := eachMount(func(point, fstype string) {
		if fstype == "cgroup2" && root == "" {
			root = point
		}
	})
	if err == nil && root == "" {
		err = errors.New("no cgroup v2 hierarchy is mounted; mount one: mount -t cgroup2 none /sys/fs/cgroup/unified")
	}
	return root, err
}

func eachMount(fn func(point, fstype string)) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	for in.Scan() {
		left, right, ok := strings.Cut(in.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if ok && len(l) > 4 && len(r) > 0 {
			fn(l[4], r[0])
		}
	}
	return in.Err()
}

func mountsBelow(prefix string) ([]string, error) {
	var found []string
	err := eachMount(func(point, _ string) {
		if strings.HasPrefix(point, prefix) {
			found = append(found, point)
		}
	})
	return found, err
}

// removeCgroup ends every process in a cgroup, by pid, and removes it with
// its children. Absent is no error.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, removeCgroup(filepath.Join(dir, e.Name())))
		}
	}
	if err != nil {
		return err
	}
	// A killed process leaves the cgroup when it is reaped, by us or by the
	// init process: that is the event awaited here.
	deadline := time.Now().Add(10 * time.Second)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		data, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, field := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(field)
			if err != nil || pid <= 1 || pid == os.Getpid() {
				return fmt.Errorf("%s/cgroup.procs holds %q", dir, field)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("end process %d of %s: %w", pid, dir, err)
			}
		}
		err = os.Remove(dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		time.Sleep(pause)
	}
}
