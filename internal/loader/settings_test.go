package loader

import "testing"

func TestSourcePorts(t *testing.T) {
	tests := []struct {
		min, max, low, high uint16
		bad                 bool
	}{
		{min: 30000, max: 32767, low: 1024, high: 29999},
		{min: 20000, max: 22767, low: 1024, high: 19999},
		{min: 2000, max: 3000, low: 3001, high: 29999},
		{min: 1, max: 1023, low: 1024, high: 29999},
		{min: 1, max: 65535, bad: true},
		{min: 1500, max: 29500, bad: true},
		{min: 1, max: 28975, low: 28976, high: 29999},
		{min: 1, max: 28976, bad: true},
	}
	for _, tt := range tests {
		low, high, err := SourcePorts(tt.min, tt.max)
		if low != tt.low || high != tt.high || (err != nil) != tt.bad {
			t.Errorf("%d-%d: got %d-%d, %v", tt.min, tt.max, low, high, err)
		}
	}
}

// What the flags say stands in the programs' constants.
func TestServiceSettings(t *testing.T) {
	read8 := func(cfg Config, name string) uint8 {
		t.Helper()
		spec, err := Spec(cfg)
		must(t, err)
		var v uint8
		must(t, spec.Variables[name].Get(&v))
		return v
	}
	read16 := func(cfg Config, name string) uint16 {
		t.Helper()
		spec, err := Spec(cfg)
		must(t, err)
		var v uint16
		must(t, spec.Variables[name].Get(&v))
		return v
	}
	if read8(Config{}, "cfg_masquerade") != 1 || read8(Config{}, "cfg_snat") != 0 || read16(Config{}, "cfg_nodeport_min") != 30000 {
		t.Error("defaults differ")
	}
	cfg := Config{NodePortMin: 2000, NodePortMax: 3000, NoMasquerade: true, SNAT: true}
	if read8(cfg, "cfg_masquerade") != 0 || read8(cfg, "cfg_snat") != 1 {
		t.Error("masquerade or snat not set")
	}
	for name, want := range map[string]uint16{
		"cfg_nodeport_min": 2000, "cfg_nodeport_max": 3000, "cfg_port_min": 3001, "cfg_port_max": 29999,
	} {
		if got := read16(cfg, name); got != want {
			t.Errorf("%s is %d, want %d", name, got, want)
		}
	}
	if _, err := Spec(Config{NodePortMin: 1, NodePortMax: 65535}); err == nil {
		t.Error("a range that leaves no source ports was taken")
	}
}
