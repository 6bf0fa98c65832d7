package sourceport

import (
	"slices"
	"testing"
)

func TestChoose(t *testing.T) {
	usual, nodePorts := Range{32768, 60999}, Range{30000, 32767}
	tests := []struct {
		name             string
		nodePorts, local Range
		want             []Range
		short, bad       bool
	}{
		{"usual", nodePorts, usual, []Range{{1024, 29999}, {61000, 65535}}, false, false},
		{"three parts", Range{20000, 22767}, usual, []Range{{1024, 19999}, {22768, 32767}, {61000, 65535}}, false, false},
		{"overlapping", Range{30000, 40000}, usual, []Range{{1024, 29999}, {61000, 65535}}, false, false},
		{"one within the other", Range{40000, 41000}, usual, []Range{{1024, 32767}, {61000, 65535}}, false, false},
		{"to the end", nodePorts, Range{32768, 65535}, []Range{{1024, 29999}}, false, false},
		{"privileged NodePorts", Range{1, 1023}, usual, []Range{{1024, 32767}, {61000, 65535}}, false, false},
		{"no NodePorts known", Range{}, usual, []Range{{1024, 32767}, {61000, 65535}}, false, false},
		{"the host takes all", nodePorts, Range{1024, 65535}, []Range{{1024, 29999}, {32768, 65535}}, true, false},
		{"just enough", nodePorts, Range{2048, 65535}, []Range{{1024, 2047}}, false, false},
		{"one too few", nodePorts, Range{2047, 65535}, []Range{{1024, 29999}, {32768, 65535}}, true, false},
		{"NodePorts everywhere", Range{1, 65535}, usual, nil, false, true},
		{"NodePorts nearly everywhere", Range{1500, 65500}, usual, nil, false, true},
	}
	for _, tt := range tests {
		got, shortage, err := Choose(tt.nodePorts, tt.local)
		if !slices.Equal(got, tt.want) || (shortage != nil) != tt.short || (err != nil) != tt.bad {
			t.Errorf("%s: %v, %v, %v", tt.name, got, shortage, err)
		}
	}
	if got, _, _ := Choose(nodePorts, usual); Count(got) != 33512 {
		t.Errorf("%d ports by default", Count(got))
	}
}

func TestCheck(t *testing.T) {
	nodePorts := Range{30000, 32767}
	for _, tt := range []struct {
		ports     []Range
		nodePorts Range
		bad       bool
	}{
		{nil, nodePorts, false},
		{[]Range{{1024, 29999}, {32768, 65535}}, nodePorts, false},
		{[]Range{{1024, 30000}}, nodePorts, true},
		{[]Range{{1024, 2000}, {32767, 32767}}, nodePorts, true},
		{[]Range{{1, 65535}}, nodePorts, true},
		{[]Range{{31000, 31001}}, nodePorts, true},
		{[]Range{{1024, 65535}}, Range{}, false},
		{[]Range{{1, 65535}}, Range{}, true},
		{[]Range{{1, 2}}, nodePorts, true},
		{[]Range{{1023, 29999}}, nodePorts, true},
		{[]Range{{1000, 1010}, {2000, 29999}}, nodePorts, true},
		{[]Range{{1000, 3000}}, Range{1, 65535}, true},
		{[]Range{{2000, 2254}}, nodePorts, true},
		{[]Range{{2000, 2255}}, nodePorts, false},
		{[]Range{{2000, 2127}, {3000, 3127}}, nodePorts, false},
		{[]Range{{2000, 2127}, {3000, 3126}}, nodePorts, true},
		{[]Range{{2000, 2254}}, Range{1, 65535}, true},
		{[]Range{{1024, 2047}}, Range{1, 65535}, false},
		{[]Range{{1024, 2047}}, Range{1, 64511}, true},
		{[]Range{{1024, 2047}}, Range{1, 64512}, false},
	} {
		if err := Check(tt.ports, tt.nodePorts); (err != nil) != tt.bad {
			t.Errorf("%v beside NodePorts %v: %v", tt.ports, tt.nodePorts, err)
		}
	}
}

func TestCheckLocal(t *testing.T) {
	local := Range{32768, 60999}
	for _, tt := range []struct {
		ports []Range
		local Range
		bad   bool
	}{
		{nil, local, false},
		{[]Range{{1024, 29999}, {61000, 65535}}, local, false},
		{[]Range{{1024, 32768}}, local, true},
		{[]Range{{1024, 29999}, {60999, 65535}}, local, true},
		{[]Range{{40000, 41000}}, local, true},
		{[]Range{{1024, 65535}}, local, true},
		{[]Range{{1024, 65535}}, Range{}, false},
	} {
		if err := CheckLocal(tt.ports, tt.local); (err != nil) != tt.bad {
			t.Errorf("%v beside the host's %v: %v", tt.ports, tt.local, err)
		}
	}
}

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		in   []string
		want []Range
		bad  bool
	}{
		{in: nil},
		{in: []string{"61000-65535", " 1024-29999"}, want: []Range{{1024, 29999}, {61000, 65535}}},
		{in: []string{"4000"}, want: []Range{{4000, 4000}}},
		{in: []string{"1-65535"}, want: []Range{{1, 65535}}},
		{in: []string{"10-20", "20-30"}, bad: true},
		{in: []string{"20-10"}, bad: true},
		{in: []string{"0-10"}, bad: true},
		{in: []string{"1-65536"}, bad: true},
		{in: []string{"http"}, bad: true},
		{in: []string{""}, bad: true},
		{in: []string{"1", "2", "3", "4", "5"}, bad: true},
	} {
		got, err := Parse(tt.in)
		if !slices.Equal(got, tt.want) || (err != nil) != tt.bad {
			t.Errorf("%q: %v, %v", tt.in, got, err)
		}
	}
}
