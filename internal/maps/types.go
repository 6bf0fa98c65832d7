package maps

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/podweir/podweir/internal/bpf"
)

// Keys and values; see bpf/types.h for the meaning of every field.
type (
	Addr            = bpf.DpPwAddr
	Ask             = bpf.DpPwAsk
	AskHalf         = bpf.DpPwAskHalf
	Backend         = bpf.DpPwBackend
	BackendKey      = bpf.DpPwBackendKey
	ChurnCount      = bpf.DpPwChurnCount
	Counter         = bpf.DpPwCounter
	Endpoint        = bpf.DpPwEndpoint
	Flow            = bpf.DpPwFlow
	FlowKey         = bpf.DpPwFlowKey
	Event           = bpf.DpPwEvent
	GenRef          = bpf.DpPwGenRef
	Node            = bpf.DpPwNode
	NodeV6          = bpf.DpPwNodeV6
	Peer            = bpf.DpPwPeer
	Place           = bpf.DpPwPlace
	PolicyEntry     = bpf.DpPwPolicyEntry
	PolicyKey       = bpf.DpPwPolicyKey
	PrefixKey       = bpf.DpPwPrefixKey
	Service         = bpf.DpPwService
	ServiceKey      = bpf.DpPwServiceKey
	BackendStateKey = bpf.DpPwBackendStKey
	MaglevKey       = bpf.DpPwMaglevKey
	Maglev          = bpf.DpPwMaglevSlots
	AffinityKey     = bpf.DpPwAffinityKey
	Affinity        = bpf.DpPwAffinityEntry
	SrcRangeKey     = bpf.DpPwSrcRangeKey
	DevAddrs        = bpf.DpPwDevAddr
	SockAsked       = bpf.DpPwSockAsked
	FragKey         = bpf.DpPwFragKey
	Frag            = bpf.DpPwFrag
	FragOrigin      = bpf.DpPwFragOrigin
	Reason          = bpf.DpPwReason
	Hook            = bpf.DpPwHook
)

// Reasons of denials by policy.
const (
	ReasonPolicyEgress  = Reason(bpf.DpPwReasonPW_DROP_POLICY_EGRESS)
	ReasonPolicyIngress = Reason(bpf.DpPwReasonPW_DROP_POLICY_INGRESS)
)

// Identities that always exist (enum pw_identity).
const (
	IdentityUnknown      = uint32(bpf.DpPwIdentityPW_ID_UNKNOWN)
	IdentityWorld        = uint32(bpf.DpPwIdentityPW_ID_WORLD)
	IdentityHost         = uint32(bpf.DpPwIdentityPW_ID_HOST)
	IdentityRemoteNode   = uint32(bpf.DpPwIdentityPW_ID_REMOTE_NODE)
	IdentityPod          = uint32(bpf.DpPwIdentityPW_ID_POD)
	IdentityFirstDynamic = uint32(bpf.DpPwIdentityPW_ID_FIRST_DYNAMIC)
)

// Flags of a [Peer] (enum pw_peer_flags).
const (
	PeerPod      = uint32(bpf.DpPwPeerFlagsPW_PEER_POD)
	PeerNode     = uint32(bpf.DpPwPeerFlagsPW_PEER_NODE)
	PeerHost     = uint32(bpf.DpPwPeerFlagsPW_PEER_HOST)
	PeerService  = uint32(bpf.DpPwPeerFlagsPW_PEER_SERVICE)
	PeerLocal    = uint32(bpf.DpPwPeerFlagsPW_PEER_LOCAL)
	PeerNodePort = uint32(bpf.DpPwPeerFlagsPW_PEER_NODEPORT)
	PeerInternal = uint32(bpf.DpPwPeerFlagsPW_PEER_INTERNAL)
	PeerPlain    = uint32(bpf.DpPwPeerFlagsPW_PEER_PLAIN)
)

// Kinds of a [PolicyKey] (enum pw_policy_kind) and verdicts (enum pw_verdict).
const (
	PolicyPort    = uint8(bpf.DpPwPolicyKindPW_POL_PORT)
	PolicyClass   = uint8(bpf.DpPwPolicyKindPW_POL_CLASS)
	PolicyAny     = uint8(bpf.DpPwPolicyKindPW_POL_ANY)
	PolicyDefault = uint8(bpf.DpPwPolicyKindPW_POL_DEFAULT)

	VerdictAllow = uint8(bpf.DpPwVerdictPW_VERDICT_ALLOW)
	VerdictDeny  = uint8(bpf.DpPwVerdictPW_VERDICT_DENY)
)

// Kinds of a [Place] (enum pw_place_kind).
const (
	PlaceNone = uint8(bpf.DpPwPlaceKindPW_PLACE_NONE)
	PlacePod  = uint8(bpf.DpPwPlaceKindPW_PLACE_POD)
	PlaceNode = uint8(bpf.DpPwPlaceKindPW_PLACE_NODE)
	PlaceWire = uint8(bpf.DpPwPlaceKindPW_PLACE_WIRE)
	PlaceHost = uint8(bpf.DpPwPlaceKindPW_PLACE_HOST)

	// PlaceQdisc is a flag of a [Place]: a pod's packets go through the qdisc
	// of its device.
	PlaceQdisc = uint8(bpf.DpPwPlaceFlagsPW_PLACE_QDISC)
	// EndpointQdisc is the flag of an [Endpoint] that says so.
	EndpointQdisc = uint16(bpf.DpPwEndpointFlagsPW_EP_QDISC)
)

// TableDefault is set in the number of a table that has a [PolicyDefault]
// entry (enum pw_table_flags).
const TableDefault = uint32(bpf.DpPwTableFlagsPW_TABLE_DEFAULT)

// Flags of a [Node] (enum pw_node_flags).
const (
	NodeDirect = uint16(bpf.DpPwNodeFlagsPW_NODE_DIRECT)
	NodeHeader = uint16(bpf.DpPwNodeFlagsPW_NODE_HEADER)
	NodeIPIP   = uint16(bpf.DpPwNodeFlagsPW_NODE_IPIP)
	NodePlain  = uint16(bpf.DpPwNodeFlagsPW_NODE_PLAIN)
)

// ServiceAddrOwned flags the {addr, 0, 0} entry of pw_services.
const ServiceAddrOwned = uint32(bpf.DpPwServiceFlagsPW_SVC_ADDR_OWNED)

// Flags of a [Service] (enum pw_service_flags).
const (
	ServiceExternal     = uint32(bpf.DpPwServiceFlagsPW_SVC_EXTERNAL)
	ServiceNoLocal      = uint32(bpf.DpPwServiceFlagsPW_SVC_NO_LOCAL)
	ServiceNoLocalExt   = uint32(bpf.DpPwServiceFlagsPW_SVC_NO_LOCAL_EXT)
	ServiceSourceRanges = uint32(bpf.DpPwServiceFlagsPW_SVC_SOURCE_RANGES)
	ServiceKeepSource   = uint32(bpf.DpPwServiceFlagsPW_SVC_KEEP_SOURCE)
)

// States of a backend (enum pw_backend_state), values of pw_backend_st.
const (
	BackendIn      = uint32(bpf.DpPwBackendStatePW_BE_IN)
	BackendExt     = uint32(bpf.DpPwBackendStatePW_BE_EXT)
	BackendCluster = uint32(bpf.DpPwBackendStatePW_BE_CLUSTER)
	BackendServing = uint32(bpf.DpPwBackendStatePW_BE_SERVING)
)

// IP protocol numbers (IANA) as they stand in keys.
const (
	ProtoTCP  = uint8(6)
	ProtoUDP  = uint8(17)
	ProtoSCTP = uint8(132)
)

// ToAddr returns a as a map key holds it: IPv4 as v4-mapped. A zone is
// ignored. The zero netip.Addr gives the zero Addr.
func ToAddr(a netip.Addr) Addr {
	if !a.IsValid() {
		return Addr{}
	}
	return Addr{B: a.As16()}
}

// FromAddr is the inverse of [ToAddr].
func FromAddr(a Addr) netip.Addr {
	return netip.AddrFrom16(a.B).Unmap()
}

// ToPrefix returns p as a key of pw_prefixes: host bits cleared, the length
// of an IPv4 prefix counted from the start of the v4-mapped form (96 + n).
func ToPrefix(p netip.Prefix) (PrefixKey, error) {
	if !p.IsValid() {
		return PrefixKey{}, fmt.Errorf("invalid prefix %v", p)
	}
	p = p.Masked()
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return PrefixKey{Len: uint32(bits), Addr: p.Addr().As16()}, nil
}

// FromPrefix is the inverse of [ToPrefix]. ::/0 stays ::/0: it covers both
// families in the map.
func FromPrefix(k PrefixKey) netip.Prefix {
	a := netip.AddrFrom16(k.Addr)
	if a.Is4In6() && k.Len >= 96 {
		return netip.PrefixFrom(a.Unmap(), int(k.Len)-96)
	}
	return netip.PrefixFrom(a, int(k.Len))
}

// ToSrcRange returns the key of pw_src_ranges that lets the clients in a
// prefix use a service: the service's 32 bits stand before the address and are
// always compared.
func ToSrcRange(service uint32, p PrefixKey) SrcRangeKey {
	var be [4]byte
	binary.BigEndian.PutUint32(be[:], service)
	return SrcRangeKey{Len: 32 + p.Len, Service: binary.NativeEndian.Uint32(be[:]), Addr: p.Addr}
}

// FromSrcRange is the inverse of [ToSrcRange].
func FromSrcRange(k SrcRangeKey) (service uint32, p PrefixKey) {
	var be [4]byte
	binary.NativeEndian.PutUint32(be[:], k.Service)
	return binary.BigEndian.Uint32(be[:]), PrefixKey{Len: k.Len - 32, Addr: k.Addr}
}
