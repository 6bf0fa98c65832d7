package bpf

import (
	"bytes"

	"github.com/cilium/ebpf/btf"
)

// LoadTypes reads the types of the datapath alone, which costs a fraction of
// what LoadDp does with its programs.
func LoadTypes() (*btf.Spec, error) {
	return btf.LoadSpecFromReader(bytes.NewReader(_DpBytes))
}
