package loader

import (
	"testing"

	"github.com/podweir/podweir/internal/bpf"
	"github.com/podweir/podweir/internal/sourceport"
)

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
	if read8(Config{}, "cfg_masquerade") != 3 || read8(Config{}, "cfg_plain") != 0 || read8(Config{}, "cfg_snat") != 0 || read16(Config{}, "cfg_nodeport_min") != 30000 {
		t.Error("defaults differ")
	}
	cfg := Config{NodePortMin: 2000, NodePortMax: 3000, NoMasquerade4: true, Plain: true, SNAT: true, SourcePorts: []sourceport.Range{{Min: 4000, Max: 4000}, {Min: 5000, Max: 5009}}}
	if read8(cfg, "cfg_masquerade") != 2 || read8(Config{NoMasquerade6: true}, "cfg_masquerade") != 1 || read8(cfg, "cfg_plain") != 1 || read8(cfg, "cfg_snat") != 1 {
		t.Error("masquerade or snat not set")
	}
	for name, want := range map[string]uint16{
		"cfg_nodeport_min": 2000, "cfg_nodeport_max": 3000,
	} {
		if got := read16(cfg, name); got != want {
			t.Errorf("%s is %d, want %d", name, got, want)
		}
	}
	for _, tt := range []struct {
		cfg  Config
		want [sourceport.Max]bpf.DpPwPortRange
	}{
		{Config{}, [sourceport.Max]bpf.DpPwPortRange{{First: 1024, Count: 28976}, {First: 61000, Count: 4536}}},
		{cfg, [sourceport.Max]bpf.DpPwPortRange{{First: 4000, Count: 1}, {First: 5000, Count: 10}}},
	} {
		spec, err := Spec(tt.cfg)
		must(t, err)
		var got [sourceport.Max]bpf.DpPwPortRange
		must(t, spec.Variables["cfg_ports"].Get(&got))
		if got != tt.want {
			t.Errorf("source ports are %v, want %v", got, tt.want)
		}
	}
	if _, err := Spec(Config{SourcePorts: make([]sourceport.Range, sourceport.Max+1)}); err == nil {
		t.Error("more ranges of source ports were taken than there is room for")
	}
}
