package main

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// offloadOff makes the stacks of all pods and nodes finish their checksums
// themselves, so that receivers verify what the programs made of them.
func (w *world) offloadOff() error {
	for _, s := range []*space{w.client.space, w.local.space, w.remote.space, w.a.space, w.b.space} {
		if err := s.do(func() error { return txChecksumOff("eth0") }); err != nil {
			return err
		}
	}
	return nil
}

// ethtoolValue is struct ethtool_value of linux/ethtool.h.
type ethtoolValue struct{ cmd, data uint32 }

const ethtoolSetTxChecksum = 0x17

func txChecksumOff(device string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := ethtoolValue{cmd: ethtoolSetTxChecksum}
	var request struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		rest [16]byte // the kernel copies a whole struct ifreq
	}
	copy(request.name[:unix.IFNAMSIZ-1], device)
	request.data = unsafe.Pointer(&value)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return fmt.Errorf("turn transmit checksums of %s off: %w", device, errno)
	}
	return nil
}
