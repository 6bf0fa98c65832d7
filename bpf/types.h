/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every key and value that the programs and the agent share, and the enums
 * both sides print. This is the only definition: Go uses the types that
 * bpf2go derives from the BTF of this file.
 *
 * Byte order: addresses are 16 bytes in network order, IPv4 as v4-mapped
 * (::ffff:a.b.c.d, RFC 4291 2.5.5.2). Ports are in HOST order everywhere in
 * the maps, so that a dump prints 80 as 80. Times are nanoseconds of
 * CLOCK_MONOTONIC (coarse). Padding is explicit and always zero: keys are
 * hashed as bytes.
 */
#ifndef PW_TYPES_H
#define PW_TYPES_H

#include <linux/types.h>

#define PW_ASSERT_SIZE(type, size) _Static_assert(sizeof(type) == (size), #type " changed its size")

/* An address of either family. */
struct pw_addr {
	__u8 b[16];
} __attribute__((aligned(8)));

/*
 * Why a packet was forwarded or dropped, and what the flow engine did. The
 * names appear, in lower case without the PW_ prefix, in metrics and in the
 * command's output. New values go at the end of their group.
 */
enum pw_reason {
	/* What became of packets that were let through. */
	PW_PASS = 0,          /* not ours: left to the kernel untouched */
	PW_FWD_LOCAL = 1,     /* to a pod of this node */
	PW_FWD_TUNNEL = 2,    /* to another node through the tunnel device */
	PW_FWD_WIRE = 3,      /* out of a device, not encapsulated */
	PW_FWD_HOST = 4,      /* up to this node's own stack */
	PW_FWD_ENCAP = 5,     /* to another node, tunnel header put on by us */
	PW_FWD_DECAP = 6,     /* to a pod of this node, tunnel header taken off by us */
	PW_FWD_DIRECT = 7,    /* to another node's pod, routed without a tunnel */

	/* What the flow engine did. */
	PW_FLOW_HIT = 8,      /* found at the first lookup: confirmed flow */
	PW_FLOW_HIT_NEW = 9,  /* found at the second: not yet confirmed */
	PW_FLOW_MISS = 10,    /* unknown: decided from scratch */
	PW_FLOW_STALE = 11,   /* known, a generation moved: decided again */
	PW_FLOW_CREATED = 12,
	PW_FLOW_CONFIRMED = 13,
	PW_FLOW_RACE_LOST = 14, /* another CPU created it first; its entry used */
	PW_FLOW_TABLE_FULL = 15, /* could not be confirmed; goes on unconfirmed */
	PW_FLOW_MIDSTREAM = 16,  /* TCP picked up in the middle */
	PW_FLOW_TAKEN_OVER = 17, /* an outlived flow made room for its tuple's next */
	PW_FLOW_PORT_CHANGED = 18, /* source port translated: reply tuple was taken */
	PW_FLOW_SWEPT = 19,      /* an idle flow removed on the agent's request */
	PW_FLOW_RESELECTED = 20, /* its backend is gone: another is chosen */
	PW_REFUSED = 21,         /* a drop that was answered: RST or port unreachable */
	PW_TOO_BIG_SENT = 22,    /* a drop that was answered with the path's MTU */
	PW_MSS_CLAMPED = 23,     /* a SYN's MSS lowered to what the tunnel carries */
	PW_SOCK_TRANSLATED = 24, /* connect() to a service went to a backend directly */
	PW_EVENT_LOST = 25, /* a drop of which nobody was told: too many, or nobody reads */
	PW_FRAGMENT_REASSEMBLY = 26, /* of a datagram that the kernel puts in order first */
	PW_FWD_IPIP = 27, /* to another node, in an IPv4 header put on by us */
	PW_TTL_SENT = 28, /* a drop that was answered: time exceeded */
	PW_PMTU_LEARNED = 29, /* a router says what the way to a node carries */

	/* Drops. */
	PW_DROP_MALFORMED = 32,      /* truncated or inconsistent headers */
	PW_DROP_UNKNOWN_L3 = 33,     /* neither IPv4, IPv6 nor ARP, from or to a pod */
	PW_DROP_FRAGMENT =
		34,       /* its datagram's first was not let through, or it can't be followed */
	PW_DROP_EXT_HEADERS = 35,    /* IPv6 extension headers beyond the bounded walk */
	PW_DROP_V4_MAPPED = 36,      /* v4-mapped IPv6 address on the wire */
	PW_DROP_SPOOFED_SOURCE = 37, /* a source address the sender does not own */
	PW_DROP_SPOOFED_FLOW = 38,   /* a live tuple from the wrong place */
	PW_DROP_BAD_SOURCE = 39,     /* loopback, multicast or zero source */
	PW_DROP_UNKNOWN_PEER = 40,   /* VXLAN from an address that is no node */
	PW_DROP_WRONG_VNI = 41,
	PW_DROP_POD_VXLAN = 42,      /* a pod sending to a node's VXLAN port */
	PW_DROP_NO_SERVICE = 43,     /* service range, address no service owns */
	PW_DROP_NO_SERVICE_PORT = 44, /* a service's address, port it lacks */
	PW_DROP_NO_BACKEND = 45,     /* service without a usable endpoint */
	PW_DROP_NO_ENDPOINT = 46,    /* local pod CIDR, address no pod has */
	PW_DROP_NO_ROUTE = 47,
	PW_DROP_NO_NODE = 48,        /* address of a node that is unknown by now */
	PW_DROP_POLICY_EGRESS = 49,  /* source isolated, no rule allows */
	PW_DROP_POLICY_INGRESS = 50, /* destination isolated, no rule allows */
	PW_DROP_FLOW_COLLISION = 51, /* reply tuple owned by another live flow */
	PW_DROP_FLOW_INSERT = 52,    /* no room for a new flow */
	PW_DROP_TTL = 53,            /* time to live or hop limit used up */
	/* 54 is free: it was ICMP errors about translated flows, which pass now. */
	PW_DROP_ICMP_UNRELATED = 55, /* ICMP error that matches no flow */
	PW_DROP_MULTICAST = 56,      /* multicast or broadcast from or to a pod */
	PW_DROP_HELPER = 57,         /* a kernel helper refused: should not happen */
	PW_DROP_TOO_BIG = 58,
	/* 59 is free: it was SCTP port translation, which had no support. */
	PW_DROP_NO_LOCAL_INTERNAL = 60, /* internalTrafficPolicy Local, none on this node */
	PW_DROP_NO_LOCAL_EXTERNAL = 61, /* externalTrafficPolicy Local, none on this node */
	PW_DROP_SOURCE_RANGE = 62,   /* not in the service's loadBalancerSourceRanges */
	PW_DROP_NO_SOURCE = 63,      /* no address of this node to send it under */
	PW_DROP_NO_PORT = 64,        /* every source port tried is taken */
	PW_DROP_STRAY = 65, /* RST or SYN-ACK of no flow that would need a port of ours */
	PW_DROP_FRAGMENT_BEFORE_FIRST = 66, /* a fragment ahead of the one that has the ports */
	PW_DROP_POD_IPIP = 67, /* a pod sending IPv4 in IPv4 to a node */
	PW_DROP_CONGESTED = 68, /* marked so outside, and the inner packet cannot say it */
	PW_DROP_UNJUDGED = 69, /* a pod's, on its way up the stack, that from_pod has not seen */

	PW_REASON_MAX = 128,
};

/*
 * skb->priority of what from_pod has passed to the stack, see guard.c. The
 * kernel zeroes it, as it does the mark, where a packet leaves a namespace;
 * unlike the mark, nobody looks at it on the way to a socket. The low bits,
 * which some queues do read, say best effort.
 */
#define PW_JUDGED 0x70770000

/* Where a packet was seen; part of the index of pw_metrics. */
enum pw_hook {
	PW_FROM_POD = 0,
	PW_TO_POD = 1,
	PW_FROM_NETDEV = 2,
	PW_TO_NETDEV = 3,
	PW_FROM_OVERLAY = 4,
	PW_TO_OVERLAY = 5,
	PW_TO_LO = 6,
	PW_SOCKET = 7, /* connect() of a host process */
	PW_FROM_FRAG = 8, /* out of the reassembly; counted at the hook that it was at before */
	PW_HOOK_MAX = 9,
};

/*
 * One counter per {reason, hook, family}: index = (reason * 9 + hook) * 2 +
 * (1 for IPv6). A per-CPU array: no contention, no allocation.
 */
struct pw_counter {
	__u64 packets;
	__u64 bytes;
};
PW_ASSERT_SIZE(struct pw_counter, 16);
#define PW_METRICS_MAX (PW_REASON_MAX * PW_HOOK_MAX * 2)

/* ---- flows ---------------------------------------------------------- */

/*
 * A tuple as it arrives at a hook. ICMP echo: the identifier is the sport
 * of the request and the dport of the reply, the other port is 0. Other
 * protocols without ports: both 0.
 */
struct pw_flow_key {
	struct pw_addr src;
	struct pw_addr dst;
	__u16 sport;
	__u16 dport;
	__u16 via; /* entry node of a source outside the cluster, else 0 */
	__u8 proto;
	__u8 pad;
};
PW_ASSERT_SIZE(struct pw_flow_key, 40);

/* A place packets come from or go to. */
enum pw_place_kind {
	PW_PLACE_NONE = 0,
	PW_PLACE_POD = 1, /* id = ifindex of the host-side veth */
	PW_PLACE_NODE = 2, /* id = node id: through the tunnel */
	PW_PLACE_WIRE = 3, /* id = ifindex to send by; arrivals match any device */
	PW_PLACE_HOST = 4, /* this node's own stack; id = 0 */
};

/* How a place takes packets. No part of which place it is. */
enum pw_place_flags {
	PW_PLACE_QDISC = 1, /* POD: through the qdisc of its veth, see PW_EP_QDISC */
	PW_PLACE_COVERED = 2, /* POD, of a packet's from: a device may be over its veth */
	PW_PLACE_FILTERED = 4, /* the same: others' filters come before it is sent on */
};

struct pw_place {
	__u32 id;
	__u8 kind;
	__u8 flags; /* enum pw_place_flags; of a flow, in its to alone */
	__u8 pad[2];
};
PW_ASSERT_SIZE(struct pw_place, 8);

/* A generation as it was when something was decided. */
struct pw_gen_ref {
	__u32 slot; /* index into pw_gens; 0 never moves */
	__u32 gen;
};
PW_ASSERT_SIZE(struct pw_gen_ref, 8);

enum pw_flow_flags {
	PW_F_REPLY = 1, /* entry of the reply direction */
	PW_F_XLATE = 2, /* src/dst/ports below differ from the key */
	PW_F_REPLIED = 4, /* a reply was seen (kept in the original's entry) */
	PW_F_CONFIRMED = 8, /* lives in pw_flows */
	PW_F_MIDSTREAM = 16, /* TCP picked up without its SYN */
	PW_F_CLAMP = 32, /* enters the tunnel from outside: sizes are limited */
	PW_F_TUNNEL = 64, /* to a node: by the tunnel in every routing mode, and in
			     * the original direction with the mark of an entry node */
};

enum pw_tcp_state {
	PW_TCP_FIN_ORIG = 1, /* FIN seen from the initiator */
	PW_TCP_FIN_REPLY = 2, /* FIN seen from the responder */
	PW_TCP_RST = 4,
};

enum pw_verdict {
	PW_VERDICT_NONE = 0,
	PW_VERDICT_ALLOW = 1,
	PW_VERDICT_DENY = 2,
};

/*
 * What to do with the packets of one direction of a flow. Complete in
 * itself: an established packet needs this entry and nothing else.
 */
struct pw_flow {
	__u64 last_seen;
	__u64 created;
	struct pw_addr src; /* the tuple after translation */
	struct pw_addr dst;
	__u16 sport;
	__u16 dport;
	__u16 twin_via; /* via of the other direction's key */
	/*
	 * PW_PLACE_POD: destination MAC of the delivery. PW_PLACE_NODE with
	 * frame: port (network order) and last four bytes of the backend.
	 */
	__u8 mac[6];
	__u8 flags; /* enum pw_flow_flags */
	__u8 tcp; /* enum pw_tcp_state */
	__u8 verdict; /* enum pw_verdict */
	__u8 reason; /* enum pw_reason of a denial, else 0 */
	struct pw_place from; /* where these packets must come from */
	struct pw_place to;
	struct pw_addr nexthop; /* PW_PLACE_WIRE; PW_PLACE_NODE with frame: the backend */
	struct pw_gen_ref src_gen; /* of the ORIGINAL direction's source */
	struct pw_gen_ref dst_gen; /* and (translated) destination */
	__u32 service; /* id of the service, 0 = none */
	__u32 rule; /* rule reference of the verdict, 0 = not isolated */
	__u32 key_hash; /* of the key; 0 = being removed: a recycled or claimed
			     * value is recognised */
	/*
	 * Direct return (see dsr.h), in both entries: on the backend's node by
	 * which node the client's packets come; on that node how its frames name
	 * the backend, enum pw_frame.
	 */
	__u16 entry;
	__u8 frame;
	__u8 moving; /* a CPU has begun to move the flow to pw_flows; in pw_flows: 0 */
};
PW_ASSERT_SIZE(struct pw_flow, 128);

/*
 * What programs did to pw_flows_new. Entries less than inserted - removed
 * were pushed out (or deleted by hand).
 */
struct pw_churn_count {
	__u64 inserted; /* new keys */
	__u64 removed;
};
PW_ASSERT_SIZE(struct pw_churn_count, 16);

enum pw_churn_row {
	PW_CHURN_COUNTED = 0, /* by the programs */
	PW_CHURN_FOUND = 1,   /* by the agent: entries from before the counting */
	PW_CHURN_ROWS = 2,
};

/* ---- fragments ------------------------------------------------------ */

/*
 * A datagram that arrives in fragments, as seen at one hook from one place:
 * nobody else's fragments are taken for its. proto is 0 for IPv6, whose
 * fragments are told by the identification alone (RFC 8200 4.5).
 */
struct pw_frag_key {
	struct pw_addr src;
	struct pw_addr dst;
	__u32 id;
	__u32 place; /* id of where it comes from; 0 for the wire, which is one place */
	__u16 via;
	__u8 proto;
	__u8 kind; /* enum pw_place_kind */
	__u8 hook; /* enum pw_hook */
	__u8 risen; /* out of the reassembly: in order, and under another id if it is IPv6 */
	__u8 pad[6];
};
PW_ASSERT_SIZE(struct pw_frag_key, 56);

enum pw_frag_state {
	PW_FRAG_PORTS = 1, /* the first was here: the rest follow the flow that ports name */
	PW_FRAG_STACK = 2, /* one was ahead of it: the kernel puts all of them together */
	PW_FRAG_SPLIT = 3, /* one was ahead of it, and dropped, or passed as the host's */
	PW_FRAG_HOST = 4, /* the host's own: the first said so */
};

struct pw_frag {
	__u64 seen; /* when this was written */
	__u32 token; /* PW_FRAG_STACK: key of pw_frag_origins */
	__u32 pad;
	__u16 sport;
	__u16 dport;
	__u16 head; /* bytes of the datagram that the first's headers take */
	__u8 proto;
	__u8 state; /* enum pw_frag_state */
};
PW_ASSERT_SIZE(struct pw_frag, 24);

/* What a datagram that goes up to the kernel's reassembly was at its hook. */
struct pw_frag_origin {
	struct pw_frag_key key;
	struct pw_addr named; /* the backend that its frames name, see dsr.h */
	__u32 device; /* of the hook */
	__u16 named_port;
	__u8 service; /* as in struct pw_pkt */
	__u8 ttl; /* as it arrived */
	__u8 dst_mac[6];
	__u8 src_mac[6];
	__u8 pad[4];
};
PW_ASSERT_SIZE(struct pw_frag_origin, 96);

/* ---- services ------------------------------------------------------- */

/*
 * A frontend. {addr, 0, 0} marks a cluster IP that some service owns.
 * {unspecified, port, proto} is a NodePort: it answers on every address of
 * the family whose peer entry says PW_PEER_NODEPORT. The unspecified address
 * is :: for IPv6 and ::ffff:0.0.0.0 for IPv4: the two families of a service
 * port have ids and sets of their own.
 */
struct pw_service_key {
	struct pw_addr addr;
	__u16 port;
	__u8 proto;
	__u8 pad[5];
};
PW_ASSERT_SIZE(struct pw_service_key, 24);

enum pw_service_flags {
	PW_SVC_ADDR_OWNED = 1, /* the {addr, 0, 0} entry */
	PW_SVC_EXTERNAL = 2, /* NodePort, load-balancer IP, external IP, host port */
	PW_SVC_NO_LOCAL = 4, /* set is empty because no endpoint is on this node */
	PW_SVC_NO_LOCAL_EXT = 8, /* the same of ext_set */
	PW_SVC_SOURCE_RANGES = 16, /* only for clients in pw_src_ranges */
	PW_SVC_KEEP_SOURCE = 32, /* externalTrafficPolicy Local: never snat */
};

/*
 * The same id stands in every frontend of one service port and family. Two
 * sets: one for the cluster's own pods and for this host, one for everybody
 * else. They may be the same set; an empty one is refused, or dropped when
 * NO_LOCAL says so.
 */
struct pw_service {
	__u32 id; /* of the service port; never 0, except in {addr, 0, 0} */
	__u32 set; /* backend set; 0 = none */
	__u32 count; /* backends in the set: slots 0 .. count-1 */
	__u32 ext_set;
	__u32 ext_count;
	__u32 maglev; /* size of ext_set's table in pw_maglev, 0 = even choice */
	__u32 affinity; /* seconds a client stays with its backend, 0 = none */
	__u32 flags; /* enum pw_service_flags */
};
PW_ASSERT_SIZE(struct pw_service, 32);

/* A set is written whole under a new number before a service points at it. */
struct pw_backend_key {
	__u32 set;
	__u32 slot;
};
PW_ASSERT_SIZE(struct pw_backend_key, 8);

struct pw_backend {
	struct pw_addr addr;
	__u16 port;
	__u8 pad[6];
};
PW_ASSERT_SIZE(struct pw_backend, 24);

/* Is a flow's own backend still one of its service's? Absent = it is gone. */
struct pw_backend_st_key {
	struct pw_addr addr;
	__u32 service;
	__u16 port;
	__u16 pad;
};
PW_ASSERT_SIZE(struct pw_backend_st_key, 24);

enum pw_backend_state {
	PW_BE_IN = 1, /* in the set of cluster IPs */
	PW_BE_EXT = 2, /* in the ext_set of external frontends */
	PW_BE_SERVING = 4, /* serves what it has: UDP flows stay with it */
	PW_BE_CLUSTER = 8, /* in the set of external frontends for pods and this host */
};

/*
 * Maglev: a table of slots of a set, cut into chunks. Entry i of a table
 * stands in chunk i / 64 at i % 64.
 */
#define PW_MAGLEV_CHUNK 64

struct pw_maglev_key {
	__u32 set;
	__u32 chunk;
};
PW_ASSERT_SIZE(struct pw_maglev_key, 8);

struct pw_maglev_slots {
	__u16 slot[PW_MAGLEV_CHUNK];
};
PW_ASSERT_SIZE(struct pw_maglev_slots, 128);

/* Session affinity ClientIP: by service port, whatever address was called. */
struct pw_affinity_key {
	struct pw_addr client;
	__u32 service;
	__u32 pad;
};
PW_ASSERT_SIZE(struct pw_affinity_key, 24);

struct pw_affinity_entry {
	struct pw_addr addr; /* of the backend */
	__u64 last_used;
	__u16 port;
	__u8 pad[6];
};
PW_ASSERT_SIZE(struct pw_affinity_entry, 32);

/*
 * What a translated socket had asked for; the key is its cookie, a number
 * that the kernel gives to no other.
 */
struct pw_sock_asked {
	struct pw_addr addr;
	__u16 port;
	__u8 pad[6];
};
PW_ASSERT_SIZE(struct pw_sock_asked, 24);

/* loadBalancerSourceRanges: present = allowed. */
struct pw_src_range_key {
	__u32 len; /* bits: 32 of the service, then the prefix as in pw_prefix_key */
	__be32 service;
	__u8 addr[16];
};
PW_ASSERT_SIZE(struct pw_src_range_key, 24);

/*
 * The addresses that this node sends under, by device; ifindex 0 has the
 * node's own. All zero = none of that family.
 */
struct pw_dev_addr {
	struct pw_addr v4;
	struct pw_addr v6;
};
PW_ASSERT_SIZE(struct pw_dev_addr, 32);

/* ---- addresses ------------------------------------------------------ */

enum pw_endpoint_flags {
	PW_EP_QDISC = 1, /* its veth sends by a qdisc, or past filters, that are not ours */
};

/* A pod address of this node. policy_*: table id, 0 = not isolated. */
struct pw_endpoint {
	__u32 id; /* endpoint id, unique on the node */
	__u32 ifindex; /* of the host-side veth */
	__u32 policy_in;
	__u32 policy_out;
	__u32 identity;
	__u32 slot; /* of pw_gens: moves when anything here changes */
	__u8 mac[6]; /* of the pod's interface */
	__u16 flags; /* enum pw_endpoint_flags */
};
PW_ASSERT_SIZE(struct pw_endpoint, 32);

/* Identities that always exist; those of policies start at 256. */
enum pw_identity {
	PW_ID_UNKNOWN = 0,
	PW_ID_WORLD = 1,
	PW_ID_HOST = 2, /* this node */
	PW_ID_REMOTE_NODE = 3,
	PW_ID_POD = 4, /* pods that no policy tells apart */
	PW_ID_FIRST_DYNAMIC = 256,
};

enum pw_peer_flags {
	PW_PEER_POD = 1, /* a pod, or inside some node's pod CIDR */
	PW_PEER_NODE = 2, /* an address of another node */
	PW_PEER_HOST = 4, /* an address of this node */
	PW_PEER_SERVICE = 8, /* service range */
	PW_PEER_LOCAL = 16, /* this node's pod CIDR: no endpoint = blackhole */
	PW_PEER_NODEPORT = 32, /* a node's address on which NodePorts answer */
	PW_PEER_INTERNAL = 64, /* an InternalIP of this node: other nodes know it as ours */
	PW_PEER_PLAIN = 128, /* pods go there under their own address */
};

/* What is known of an address: value of pw_addrs and of pw_prefixes. */
struct pw_peer {
	__u32 identity;
	__u32 slot;
	__u32 node; /* node id to tunnel to, 0 = not behind a node */
	__u32 flags;
};
PW_ASSERT_SIZE(struct pw_peer, 16);

/* Families as bits of a setting. */
enum pw_families {
	PW_IPV4 = 1,
	PW_IPV6 = 2,
};

/* Source ports that may be given away: count of them from first on. */
struct pw_port_range {
	__u16 first;
	__u16 count;
};
PW_ASSERT_SIZE(struct pw_port_range, 4);
#define PW_PORT_RANGES 4

struct pw_prefix_key {
	__u32 len; /* bits; IPv4 prefixes count from the v4-mapped start: 96 + n */
	__u8 addr[16];
};
PW_ASSERT_SIZE(struct pw_prefix_key, 20);

enum pw_node_flags {
	PW_NODE_DIRECT = 1, /* its pods are reached by plain routing */
	PW_NODE_HEADER = 2, /* header may be used, else the tunnel device sends */
	PW_NODE_IPIP = 4, /* IPv4 of its pods goes to it in IPv4 alone */
	PW_NODE_PLAIN = 8, /* its pods' packets are taken as they are, however ours go */
};

/*
 * A tunnel peer; index = node id, 1-based. Zero addr = no such node. Of index
 * 0 only addr counts: this node's own tunnel address.
 *
 * header is what stands before the inner IP header on the wire: outer
 * Ethernet (addresses left to the neighbour table), IPv4 (not to be fragmented:
 * a router that cannot says so, see pw_learn_mtu), UDP, VXLAN, inner Ethernet.
 * Lengths, identification, checksums and the UDP source port are 0
 * in it; header_sum is the ones' complement sum of its IPv4 header.
 */
struct pw_node {
	struct pw_addr addr; /* outer destination */
	struct pw_addr nexthop; /* towards addr */
	struct pw_addr nexthop6; /* the same for IPv6 when routed directly */
	__u32 ifindex; /* device towards addr */
	__u16 mtu; /* inner IP bytes that fit a frame; 0 = not known */
	__u16 header_sum;
	__u8 mac[6]; /* of its podweir.vxlan */
	__u16 flags; /* enum pw_node_flags */
	__u8 header[64];
};
PW_ASSERT_SIZE(struct pw_node, 128);

/*
 * The first 96 bits of a node's IPv6 addresses, the rest is 0. Index = node id,
 * 0 = this node. All zero = not known.
 */
struct pw_node_v6 {
	struct pw_addr pods; /* of its pod range */
	struct pw_addr host; /* of its own address */
};
PW_ASSERT_SIZE(struct pw_node_v6, 32);

/* The last byte of the inner Ethernet source between nodes, see tunnel.h. */
enum pw_frame {
	PW_FRAME_PLAIN = 1,
	PW_FRAME_VIA = 2, /* entered at the sending node */
	PW_FRAME_POD = 3, /* and names its backend, see dsr.h */
	PW_FRAME_HOST = 4,
};

/* Offsets in pw_node.header. */
#define PW_HDR_IP 14
#define PW_HDR_UDP 34
#define PW_HDR_VXLAN 42
#define PW_HDR_INNER 50
#define PW_HDR_LEN 64
/* What a VXLAN header over IPv4 adds between Ethernet and the inner packet. */
#define PW_ENCAP_LEN 50
#define PW_ENCAP6_LEN 70 /* over IPv6 */

/* ---- policy --------------------------------------------------------- */

enum pw_policy_kind {
	PW_POL_PORT = 0, /* port is a port number */
	PW_POL_CLASS = 1, /* port is a class from pw_port_class */
	PW_POL_ANY = 2, /* any protocol and port: proto and port are 0 */
	PW_POL_DEFAULT = 3, /* any peer too: identity, proto and port are 0 */
};

/* Parts of a table's number. */
enum pw_table_flags {
	PW_TABLE_DEFAULT = 1 << 30, /* it has an entry of the kind DEFAULT */
};

/*
 * A compiled verdict. Probed in the order PORT, CLASS, ANY and, in a table
 * whose number says so, DEFAULT; the first that exists is the answer; none =
 * denied (a table exists only for a pod that some policy is about in that
 * direction).
 */
struct pw_policy_key {
	__u32 table;
	__u32 identity;
	__u16 port;
	__u8 proto;
	__u8 kind;
};
PW_ASSERT_SIZE(struct pw_policy_key, 12);

struct pw_policy_entry {
	__u32 rule; /* reference into the agent's rule list; 0: no rule decided */
	__u8 verdict; /* enum pw_verdict */
	__u8 pad[3];
};
PW_ASSERT_SIZE(struct pw_policy_entry, 8);

/* ---- events --------------------------------------------------------- */

/* A packet that was dropped, in pw_events. */
struct pw_event {
	__u64 time;
	struct pw_flow_key key; /* as it arrived */
	/*
	 * Whom it is about. Of a denial by policy: what the policies judged,
	 * which is the flow's original direction after translation. Else the
	 * tuple as it arrived.
	 */
	struct pw_addr src;
	struct pw_addr dst;
	struct pw_place from; /* where the packet came from */
	__u32 src_identity;
	__u32 dst_identity;
	__u32 reason; /* enum pw_reason */
	__u32 table; /* that denied */
	__u32 rule; /* in it; 0 = none allows */
	__u32 service;
	__u16 dport;
	__u8 hook; /* enum pw_hook */
	__u8 v6;
	__u8 pad[4];
};
PW_ASSERT_SIZE(struct pw_event, 120);

/* ---- questions ------------------------------------------------------ */

/* What one end's policies say of the other end. */
struct pw_ask_half {
	__u32 table; /* 0 = not isolated */
	__u32 identity; /* of the other end */
	__u32 rule; /* 0 = none says anything */
	__u8 verdict; /* enum pw_verdict; NONE = not asked on this node */
	__u8 pad[3];
};
PW_ASSERT_SIZE(struct pw_ask_half, 16);

/* A question to the program ask, and in the same place its answer. */
struct pw_ask {
	struct pw_flow_key key; /* in: a first packet as it would arrive; via 0 */
	__u32 slot;             /* in: of a service's backends the one to ask about */
	__u32 device;           /* out: to be run on, which routes are looked up from */
	struct pw_place from;   /* where the source lives, so packets must come from there */
	struct pw_place to;
	struct pw_addr dst; /* after translation */
	__u16 dport;
	__u16 pad;
	__u32 reason; /* enum pw_reason of the drop, 0 = allowed */
	__u32 service;
	__u32 backends; /* of the service, for this caller; slot counts them */
	struct pw_ask_half egress; /* of the source */
	struct pw_ask_half ingress; /* of the destination */
};
PW_ASSERT_SIZE(struct pw_ask, 128);

#endif
