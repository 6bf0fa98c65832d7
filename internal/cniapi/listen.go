package cniapi

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// Listener is a unix socket whose file can be put back when somebody removed
// it. Closing it removes the file, unless a successor has put its own there.
type Listener struct {
	path string

	mu     sync.Mutex
	now    *net.UnixListener
	own    fs.FileInfo // of its file
	closed bool
}

// Listen opens a unix socket that only its owner may use. It takes the place
// of a socket that nobody listens on any more; a live one is an error.
func Listen(path string) (*Listener, error) {
	unix, own, err := listen(path)
	if err != nil {
		return nil, err
	}
	return &Listener{path: path, now: unix, own: own}, nil
}

func listen(path string) (*net.UnixListener, fs.FileInfo, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, nil, fmt.Errorf("socket %s: %w", path, err)
	}
	if conn, err := net.Dial("unix", path); err == nil {
		_ = conn.Close()
		return nil, nil, fmt.Errorf("socket %s: another process listens on it", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() != fs.ModeSocket {
		return nil, nil, fmt.Errorf("socket %s: a file that is no socket is in the way", path)
	}
	// Its final name appears only when its mode is right.
	temp := path + "~"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l, err := net.Listen("unix", temp)
	if err != nil {
		if errors.Is(err, syscall.EINVAL) {
			err = fmt.Errorf("the path is too long for a socket: %w", err)
		}
		return nil, nil, fmt.Errorf("socket %s: %w", path, err)
	}
	unix := l.(*net.UnixListener)
	unix.SetUnlinkOnClose(false)
	err = os.Chmod(temp, 0o600)
	var own fs.FileInfo
	if err == nil {
		own, err = os.Lstat(temp)
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("socket %s: %w", path, err), l.Close(), os.Remove(temp))
	}
	return unix, own, nil
}

// Restore listens anew where the socket's file is not its own any more:
// without it nobody finds the way here. It tells whether that was necessary.
// Connections that are open stay.
func (l *Listener) Restore() (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.inPlace() {
		return false, nil
	}
	unix, own, err := listen(l.path)
	if err != nil {
		return false, fmt.Errorf("the socket's file has gone, and nobody can ask this process for anything: %w", err)
	}
	old := l.now
	l.now, l.own = unix, own
	_ = old.Close() // Accept goes on with the new one
	return true, nil
}

func (l *Listener) inPlace() bool {
	now, err := os.Lstat(l.path)
	return err == nil && os.SameFile(now, l.own)
}

func (l *Listener) current() *net.UnixListener {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now
}

// Accept implements [net.Listener].
func (l *Listener) Accept() (net.Conn, error) {
	for {
		now := l.current()
		conn, err := now.Accept()
		if err == nil || !errors.Is(err, net.ErrClosed) || l.current() == now {
			return conn, err
		}
	}
}

// Addr implements [net.Listener].
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// Close implements [net.Listener].
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed && l.inPlace() {
		_ = os.Remove(l.path)
	}
	l.closed = true
	return l.now.Close()
}
