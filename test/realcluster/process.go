package realcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// startProcess starts a program that outlives this one. What it says goes to
// the log; record gets its pid and when it started, so that no other process
// that comes to have the number is ever taken for it.
func startProcess(record, log string, cmd *exec.Cmd) error {
	for _, d := range []string{filepath.Dir(record), filepath.Dir(log)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Setsid = true
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	go func() { _ = cmd.Wait() }() // of interest to running alone
	began, err := startTime(cmd.Process.Pid)
	if err == nil {
		err = os.WriteFile(record, fmt.Appendf(nil, "%d %s\n", cmd.Process.Pid, began), 0o644)
	}
	if err != nil {
		return errors.Join(err, cmd.Process.Kill())
	}
	return nil
}

// startTime is field 22 of /proc/PID/stat.
func startTime(pid int) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	f := strings.Fields(rest)
	if len(f) < 20 {
		return "", fmt.Errorf("/proc/%d/stat is short", pid)
	}
	if f[0] == "Z" || f[0] == "X" {
		return "", fs.ErrNotExist
	}
	return f[19], nil
}

// running returns the pid of a recorded process; 0 if it has ended.
func running(record string) int {
	data, err := os.ReadFile(record)
	if err != nil {
		return 0
	}
	f := strings.Fields(string(data))
	if len(f) != 2 {
		return 0
	}
	pid, err := strconv.Atoi(f[0])
	if err != nil {
		return 0
	}
	if began, err := startTime(pid); err != nil || began != f[1] {
		return 0
	}
	return pid
}

// stopProcess ends a recorded process, kindly at first, and waits for it.
func stopProcess(record string, grace time.Duration) error {
	if pid := running(record); pid != 0 {
		if grace > 0 {
			_ = syscall.Kill(pid, syscall.SIGTERM)
			waitEnd(record, grace)
		}
		if running(record) == pid {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			if !waitEnd(record, 20*time.Second) {
				return fmt.Errorf("process %d (%s) does not end", pid, record)
			}
		}
	}
	if err := os.Remove(record); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func waitEnd(record string, limit time.Duration) bool {
	for end := time.Now().Add(limit); running(record) != 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// until tries again until ok, or until the process that it depends on is gone.
func until(ctx context.Context, what, record, log string, limit time.Duration, ok func() error) error {
	end := time.Now().Add(limit)
	for {
		err := ok()
		if err == nil {
			return nil
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case record != "" && running(record) == 0:
			return fmt.Errorf("%s: the process has ended:\n%s", what, tail(log))
		case time.Now().After(end):
			return fmt.Errorf("%s: not within %v: %w\n%s", what, limit, err, tail(log))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// tail is the end of a log.
func tail(log string) string {
	data, err := os.ReadFile(log)
	if err != nil {
		return ""
	}
	return log + ":\n" + last(string(data), 15)
}

// run runs a command to its end.
func run(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
