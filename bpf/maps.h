/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps. Names are what bpftool prints (15 characters at most). Sizes
 * here are defaults; the loader overrides them from the agent's flags.
 */
#ifndef PW_MAPS_H
#define PW_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "types.h"

/* Confirmed flows. A plain hash: nothing is ever evicted from it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__type(key, struct pw_flow_key);
	__type(value, struct pw_flow);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_flows SEC(".maps");

/* Flows not yet confirmed. LRU: a flood pushes out only its own kind. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct pw_flow_key);
	__type(value, struct pw_flow);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_flows_new SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PW_CHURN_ROWS);
	__type(key, __u32);
	__type(value, struct pw_churn_count);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_churn SEC(".maps");

/*
 * Datagrams in fragments, written by the programs alone. Full: what is left of
 * the one that began first is ahead of its first, as it were.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct pw_frag_key);
	__type(value, struct pw_frag);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_frags SEC(".maps");

/*
 * Datagrams that are in the reassembly, by a token of their own, written by
 * the programs alone. Full: the one that was last heard of longest ago is
 * dropped when it comes back.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct pw_frag_origin);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_frag_origins SEC(".maps");

/* Generations. Full = the agent gives slot 1, shared by all that overflow. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 262144);
	__type(key, __u32);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_gens SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_service_key);
	__type(value, struct pw_service);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_backend_key);
	__type(value, struct pw_backend);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 524288);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_backend_st_key);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_backend_st SEC(".maps");

/* Only services with external frontends have a table. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 524288);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_maglev_key);
	__type(value, struct pw_maglev_slots);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_maglev SEC(".maps");

/*
 * Clients outside. Full: the one that was longest away is forgotten, and
 * whoever sends under many names can bring that about.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct pw_affinity_key);
	__type(value, struct pw_affinity_entry);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_affinity SEC(".maps");

/* Pods and processes of this node, which have no names but their own. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct pw_affinity_key);
	__type(value, struct pw_affinity_entry);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_affinity_in SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_src_range_key);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_src_ranges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct pw_dev_addr);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_dev_addrs SEC(".maps");

/*
 * Written by the programs alone. Full: getpeername() of the oldest socket
 * tells its backend.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, struct pw_sock_asked);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_sock_rev SEC(".maps");

/* Pod addresses of this node. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_addr);
	__type(value, struct pw_endpoint);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_endpoints SEC(".maps");

/*
 * Pods' veths with filters of others at their ingress (ifindex) -> the device
 * that the agent has put over it, and that device -> the veth. See filtered.h.
 * Full: the pod's packets pass its filters by, which is reported.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_filtered SEC(".maps");

/* Exact addresses: pods of all nodes, nodes, this node's own. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_addr);
	__type(value, struct pw_peer);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_addrs SEC(".maps");

/* Pod CIDRs, policy CIDRs, service ranges; the empty prefix is the world. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_prefix_key);
	__type(value, struct pw_peer);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 8192);
	__type(key, __u32);
	__type(value, struct pw_node);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_nodes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 8192);
	__type(key, __u32);
	__type(value, struct pw_node_v6);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_node_v6 SEC(".maps");

/* Outer source address -> node id: the only tunnel peers accepted. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_addr);
	__type(value, __u32);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_node_ids SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pw_policy_key);
	__type(value, struct pw_policy_entry);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_policy SEC(".maps");

/* Port -> class of ports that no port range in force tells apart. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u16);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_port_class SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PW_METRICS_MAX);
	__type(key, __u32);
	__type(value, struct pw_counter);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_metrics SEC(".maps");

/* Full, because no agent reads: events are lost, counted as event_lost. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 262144); /* bytes */
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} pw_events SEC(".maps");

#endif
