package loader

import (
	"fmt"
	"time"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/maps"
)

// Timeouts says how long an idle flow is kept, as bpf/settings.h has it.
type Timeouts struct {
	TCPNew, TCPEstablished, TCPHalfClosed, TCPClosed time.Duration
	UDPNew, UDPStream, ICMP, Other                   time.Duration
}

// LoadTimeouts reads the settings of the embedded datapath.
func LoadTimeouts() (Timeouts, error) {
	var t Timeouts
	spec, err := bpf.LoadDp()
	if err != nil {
		return t, fmt.Errorf("read embedded datapath: %w", err)
	}
	for name, to := range map[string]*time.Duration{
		"cfg_tcp_new": &t.TCPNew, "cfg_tcp_established": &t.TCPEstablished,
		"cfg_tcp_half_closed": &t.TCPHalfClosed, "cfg_tcp_closed": &t.TCPClosed,
		"cfg_udp_new": &t.UDPNew, "cfg_udp_stream": &t.UDPStream,
		"cfg_icmp": &t.ICMP, "cfg_other": &t.Other,
	} {
		var ns uint64
		if err := spec.Variables[name].Get(&ns); err != nil {
			return t, fmt.Errorf("read setting %s: %w", name, err)
		}
		*to = time.Duration(ns)
	}
	return t, nil
}

// For returns the timeout of one entry; the same rule as pw_flow_timeout.
func (t Timeouts) For(k maps.FlowKey, f maps.Flow) time.Duration {
	const bothFIN = uint8(bpf.DpPwTcpStatePW_TCP_FIN_ORIG | bpf.DpPwTcpStatePW_TCP_FIN_REPLY)
	const rst = uint8(bpf.DpPwTcpStatePW_TCP_RST)
	confirmed := f.Flags&uint8(bpf.DpPwFlowFlagsPW_F_CONFIRMED) != 0
	midstream := f.Flags&uint8(bpf.DpPwFlowFlagsPW_F_MIDSTREAM) != 0
	switch k.Proto {
	case maps.ProtoTCP:
		switch {
		case f.Tcp&rst != 0 || f.Tcp&bothFIN == bothFIN:
			return t.TCPClosed
		case f.Tcp != 0:
			return t.TCPHalfClosed
		case confirmed || midstream:
			return t.TCPEstablished
		}
		return t.TCPNew
	case maps.ProtoUDP:
		if confirmed {
			return t.UDPStream
		}
		return t.UDPNew
	case 1, 58: // ICMP, ICMPv6
		return t.ICMP
	}
	return t.Other
}
