package probe

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// receiveBuffer holds some ten thousand small datagrams; the kernel's default
// less than three hundred.
const receiveBuffer = 8 << 20

// LargeBuffer is the Control of a [net.ListenConfig] or [net.Dialer] whose
// sockets keep what arrives while the program gets no CPU, so that a loss is
// one of the network. Without CAP_NET_ADMIN, as in a pod, the buffer is as large
// as the machine allows everybody.
func LargeBuffer(_, _ string, c syscall.RawConn) error {
	var serr error
	err := c.Control(func(fd uintptr) {
		if typ, _ := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TYPE); typ == unix.SOCK_DGRAM {
			serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
			if errors.Is(serr, unix.EPERM) {
				serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
			}
		}
	})
	return errors.Join(err, serr)
}
