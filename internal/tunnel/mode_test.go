package tunnel

import (
	"strings"
	"testing"
)

func TestParseMode(t *testing.T) {
	for _, m := range Modes() {
		if got, err := ParseMode(string(m)); err != nil || got != m {
			t.Errorf("ParseMode(%q) = %q, %v", m, got, err)
		}
	}
	for _, s := range []string{"", "VXLAN", "ipip ", "never"} {
		if _, err := ParseMode(s); err == nil || !strings.Contains(err.Error(), "vxlan, ipip, cross-subnet, ipip-cross-subnet, direct") {
			t.Errorf("ParseMode(%q): %v", s, err)
		}
	}
}

func TestModes(t *testing.T) {
	for _, tt := range []struct {
		mode                         Mode
		onlink, offlink, ipip, encap bool
	}{
		{ModeVXLAN, false, false, false, true},
		{ModeIPIP, false, false, true, true},
		{ModeCrossSubnet, true, false, false, true},
		{ModeIPIPCrossSubnet, true, false, true, true},
		{ModeDirect, true, true, false, false},
	} {
		m := tt.mode
		if m.Direct(true) != tt.onlink || m.Direct(false) != tt.offlink || m.IPIP() != tt.ipip || m.Encapsulates() != tt.encap || m.Routes() != (tt.onlink || tt.offlink) {
			t.Errorf("%s: direct on the link %v, behind a router %v, ipip %v, encapsulates %v, routes %v", m, m.Direct(true), m.Direct(false), m.IPIP(), m.Encapsulates(), m.Routes())
		}
	}
}

func TestMTU(t *testing.T) {
	for _, tt := range []struct {
		mode   Mode
		device int
		outer  string
		want   MTU
	}{
		{ModeVXLAN, 1500, "172.31.0.3", MTU{1450, 1450, 1450}},
		{ModeVXLAN, 1500, "::ffff:172.31.0.3", MTU{1450, 1450, 1450}},
		{ModeVXLAN, 1500, "fd00::3", MTU{1430, 1430, 1430}},
		{ModeVXLAN, 9000, "172.31.0.3", MTU{8950, 8950, 8950}},
		{ModeCrossSubnet, 1500, "172.31.0.3", MTU{1450, 1450, 1450}},
		{ModeIPIP, 1500, "172.31.0.3", MTU{1480, 1450, 1450}},
		{ModeIPIPCrossSubnet, 1500, "172.31.0.3", MTU{1480, 1450, 1450}},
		{ModeIPIP, 1500, "fd00::3", MTU{1430, 1430, 1430}},
		{ModeDirect, 1500, "172.31.0.3", MTU{1500, 1500, 1450}},
		{ModeDirect, 1500, "fd00::3", MTU{1500, 1500, 1430}},
	} {
		if got := tt.mode.MTU(tt.device, addr(tt.outer)); got != tt.want {
			t.Errorf("%s on %d by %s = %+v, want %+v", tt.mode, tt.device, tt.outer, got, tt.want)
		}
	}
}

func TestFixedMTU(t *testing.T) {
	for _, tt := range []struct {
		mode Mode
		pod  int
		auto MTU
		want MTU
	}{
		{ModeVXLAN, 1400, MTU{1450, 1450, 1450}, MTU{1400, 1400, 1400}},
		{ModeDirect, 9000, MTU{1500, 1500, 1450}, MTU{9000, 9000, 9000}},
		{ModeIPIP, 1470, MTU{1480, 1450, 1450}, MTU{1470, 1450, 1450}},
		{ModeIPIP, 1400, MTU{1480, 1450, 1450}, MTU{1400, 1400, 1400}},
		{ModeIPIP, 1470, MTU{}, MTU{1470, 1470, 1470}},
	} {
		if got := tt.mode.FixedMTU(tt.pod, tt.auto); got != tt.want {
			t.Errorf("%s, --mtu %d over %+v = %+v, want %+v", tt.mode, tt.pod, tt.auto, got, tt.want)
		}
	}
}
