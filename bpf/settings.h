/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Settings. Constants of the loaded program: the loader writes them before
 * the load, the verifier prunes what they rule out, the packet path pays
 * nothing. There is no #ifdef for a feature anywhere.
 */
#ifndef PW_SETTINGS_H
#define PW_SETTINGS_H

#include "types.h"

#define PW_SEC 1000000000ULL

/* podweir.vxlan, 0 = tunnel not there yet: nothing is sent through it. */
const volatile __u32 cfg_overlay_ifindex = 0;
const volatile __u32 cfg_vni = 4096;
const volatile __u16 cfg_vxlan_port = 4789;

/* skb mark bit of a packet that one of our hooks has already decided. */
const volatile __u32 cfg_mark = 0x1000;

/*
 * Source ports given to flows whose own is taken: outside the NodePort range
 * and ip_local_port_range, see loader.SourcePorts. Ranges without any end them.
 */
const volatile struct pw_port_range cfg_ports[PW_PORT_RANGES] = {
	{ .first = 1024, .count = 30000 - 1024 },
	{ .first = 61000, .count = 65536 - 61000 },
};

/* --service-node-port-range: where a NodePort may be. */
const volatile __u16 cfg_nodeport_min = 30000;
const volatile __u16 cfg_nodeport_max = 32767;

/*
 * enum pw_families whose packets from pods to what is no pod and not this node
 * leave under this node's address; the others under their own.
 */
const volatile __u8 cfg_masquerade = PW_IPV4 | PW_IPV6;
/* Some addresses are PW_PEER_PLAIN, an exception from that. */
const volatile __u8 cfg_plain = 0;
/* What enters from outside by a service goes on under this node's address. */
const volatile __u8 cfg_snat = 0;
/* To a backend on another node it keeps its address, and is answered from there. */
const volatile __u8 cfg_dsr = 0;

/*
 * ICMP errors that answer packets from outside, per second and CPU, with a
 * burst of PW_ERROR_BURST (RFC 1812 4.3.2.8, RFC 4443 2.4 f). 0 = no limit.
 */
const volatile __u32 cfg_errors_per_sec = 1000;

/*
 * Events about drops, per second and CPU, with a burst of PW_EVENT_BURST:
 * denials by policy and all others, each. 0 = none.
 */
const volatile __u32 cfg_events_per_sec = 100;

/*
 * Whose sockets are translated at connect(): the network namespace of this
 * node. 0 = nobody's.
 */
const volatile __u64 cfg_netns_cookie = 0;

/* podweir.frag, behind which the kernel reassembles. 0 = this one cannot. */
const volatile __u32 cfg_frag_ifindex = 0;

/* How long the ports of a datagram's first fragment are those of the rest. */
const volatile __u64 cfg_frag_time = 10 * PW_SEC;

/* How long an idle flow is kept, in nanoseconds. */
const volatile __u64 cfg_tcp_new = 60 * PW_SEC;
const volatile __u64 cfg_tcp_established = 86400 * PW_SEC;
const volatile __u64 cfg_tcp_half_closed = 3600 * PW_SEC;
const volatile __u64 cfg_tcp_closed = 60 * PW_SEC;
const volatile __u64 cfg_udp_new = 30 * PW_SEC;
const volatile __u64 cfg_udp_stream = 180 * PW_SEC;
const volatile __u64 cfg_icmp = 30 * PW_SEC;
const volatile __u64 cfg_other = 120 * PW_SEC;

#endif
