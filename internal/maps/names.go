package maps

import (
	"fmt"
	"sort"
	"strings"
	"sync"

	"github.com/cilium/ebpf/btf"

	"github.com/podweir/podweir/internal/bpf"
)

// enumNames are the names of one C enum by value, sorted by value.
type enumNames struct {
	values []uint64
	names  map[uint64]string
}

// enums reads the names once, from the BTF of the embedded object: the C
// headers are the only table of names.
var enums = sync.OnceValues(func() (map[string]enumNames, error) {
	types, err := bpf.LoadTypes()
	if err != nil {
		return nil, fmt.Errorf("embedded datapath: %w", err)
	}
	out := make(map[string]enumNames)
	for _, e := range []struct{ enum, prefix string }{
		{"pw_reason", "PW_"},
		{"pw_hook", "PW_"},
		{"pw_verdict", "PW_VERDICT_"},
		{"pw_place_kind", "PW_PLACE_"},
		{"pw_flow_flags", "PW_F_"},
		{"pw_tcp_state", "PW_TCP_"},
		{"pw_service_flags", "PW_SVC_"},
		{"pw_identity", "PW_ID_"},
		{"pw_peer_flags", "PW_PEER_"},
		{"pw_policy_kind", "PW_POL_"},
	} {
		var t *btf.Enum
		if err := types.TypeByName(e.enum, &t); err != nil {
			return nil, fmt.Errorf("embedded datapath: enum %s: %w", e.enum, err)
		}
		n := enumNames{names: make(map[uint64]string, len(t.Values))}
		for _, v := range t.Values {
			if strings.HasSuffix(v.Name, "_MAX") {
				continue
			}
			n.values = append(n.values, v.Value)
			n.names[v.Value] = strings.ToLower(strings.TrimPrefix(v.Name, e.prefix))
		}
		sort.Slice(n.values, func(i, j int) bool { return n.values[i] < n.values[j] })
		out[e.enum] = n
	}
	return out, nil
})

func enumName(enum string, v uint64) string {
	if all, err := enums(); err == nil {
		if name, ok := all[enum].names[v]; ok {
			return name
		}
	}
	return fmt.Sprintf("%s_%d", strings.TrimPrefix(enum, "pw_"), v)
}

func flagNames(enum string, v uint64) []string {
	all, err := enums()
	if err != nil {
		return []string{fmt.Sprintf("0x%x", v)}
	}
	var out []string
	for _, bit := range all[enum].values {
		if bit != 0 && v&bit == bit {
			out = append(out, all[enum].names[bit])
			v &^= bit
		}
	}
	if v != 0 {
		out = append(out, fmt.Sprintf("0x%x", v))
	}
	return out
}

// ReasonName is the name of a reason as metrics and the command print it:
// "drop_no_service".
func ReasonName(r Reason) string { return enumName("pw_reason", uint64(r)) }

// IsDrop tells the reasons of drops from those of packets let through.
func IsDrop(r Reason) bool { return strings.HasPrefix(ReasonName(r), "drop_") }

// DropReasons are the names of all reasons of drops.
func DropReasons() []string {
	var out []string
	for r := range Reason(bpf.DpPwReasonPW_REASON_MAX) {
		if IsDrop(r) {
			out = append(out, ReasonName(r))
		}
	}
	return out
}

// IsEvent says that r is not how a packet ended, but what was done on the way.
func IsEvent(r Reason) bool {
	return r >= Reason(bpf.DpPwReasonPW_FLOW_HIT) && !IsDrop(r)
}

// HookName is the name of a program: "from_pod".
func HookName(h Hook) string { return enumName("pw_hook", uint64(h)) }

// PlaceName names the kind of a [Place]: "pod", "node", "wire", "host".
func PlaceName(kind uint8) string { return enumName("pw_place_kind", uint64(kind)) }

// VerdictName is "allow", "deny" or "none".
func VerdictName(v uint8) string { return enumName("pw_verdict", uint64(v)) }

// FlowFlagNames names the flags of a [Flow]: "reply", "xlate", ...
func FlowFlagNames(flags uint8) []string { return flagNames("pw_flow_flags", uint64(flags)) }

// TCPStateNames names the closing events a TCP flow has seen.
func TCPStateNames(state uint8) []string { return flagNames("pw_tcp_state", uint64(state)) }

// PeerFlagNames names the flags of a [Peer].
func PeerFlagNames(flags uint32) []string { return flagNames("pw_peer_flags", uint64(flags)) }

// ServiceFlagNames names the flags of a [Service].
func ServiceFlagNames(flags uint32) []string { return flagNames("pw_service_flags", uint64(flags)) }

// PolicyKindName names the kind of a [PolicyKey].
func PolicyKindName(kind uint8) string { return enumName("pw_policy_kind", uint64(kind)) }

// IdentityName names an identity that always exists, and numbers the others.
func IdentityName(id uint32) string {
	if id >= IdentityFirstDynamic {
		return fmt.Sprint(id)
	}
	return enumName("pw_identity", uint64(id))
}
