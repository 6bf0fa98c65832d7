/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From a service's address and port to one of its backends. */
#ifndef PW_SERVICE_H
#define PW_SERVICE_H

#include "dsr.h"
#include "flow.h"
#include "maps.h"
#include "parse.h"
#include "policy.h"
#include "scratch.h"

static __always_inline struct pw_service *pw_service_lookup(const struct pw_addr *addr, __u16 port,
							    __u8 proto)
{
	struct pw_service_key k = { .addr = *addr, .port = port, .proto = proto };

	return bpf_map_lookup_elem(&pw_services, &k);
}

/*
 * The frontend of a tuple: the very address, or a NodePort on an address of
 * a node; from outside on one of this node's own only. A loopback address has
 * some for the node's sockets (pw_sock_frontend): no packet may come to those,
 * whoever has sent it.
 */
static __always_inline struct pw_service *pw_service_find(const struct pw_addr *dst, __u16 port,
							  __u8 proto, int own)
{
	struct pw_service_key k = { .addr = *dst, .port = port, .proto = proto };
	struct pw_service *svc = bpf_map_lookup_elem(&pw_services, &k);
	struct pw_peer *peer;

	if (svc && pw_addr_is_loopback(dst))
		return NULL;
	if (svc || port < cfg_nodeport_min || port > cfg_nodeport_max)
		return svc;
	peer = bpf_map_lookup_elem(&pw_addrs, &k.addr);
	if (!peer || !(peer->flags & PW_PEER_NODEPORT) || (own && !(peer->flags & PW_PEER_HOST)))
		return NULL;
	if (pw_addr_is_v4(&k.addr))
		pw_addr_v4(&k.addr, 0);
	else
		__builtin_memset(&k.addr, 0, sizeof(k.addr));
	return bpf_map_lookup_elem(&pw_services, &k);
}

/*
 * The frontend of a call from there. What another node sends here it has
 * translated, except for what it cannot know: a host port. Pods of other nodes
 * come to one under their own address if they are not masqueraded: there as
 * little as here.
 */
static __always_inline struct pw_service *pw_service_called(const struct pw_flow_key *call,
							    const struct pw_place *from)
{
	struct pw_addr dst = call->dst;
	struct pw_peer *peer;

	if (from->kind != PW_PLACE_NODE)
		return pw_service_find(&dst, call->dport, call->proto, from->kind == PW_PLACE_WIRE);
	if (call->via || (pw_masquerade_to(&dst) && !cfg_plain))
		return NULL;
	peer = bpf_map_lookup_elem(&pw_addrs, &dst);
	if (!peer || !(peer->flags & PW_PEER_HOST) ||
	    (pw_masquerade_to(&dst) && !(peer->flags & PW_PEER_PLAIN)))
		return NULL;
	return pw_service_lookup(&dst, call->dport, call->proto);
}

static __always_inline __u32 pw_backend_state(const struct pw_addr *addr, __u16 port, __u32 service)
{
	struct pw_backend_st_key k = { .addr = *addr, .service = service, .port = port };
	__u32 *state = bpf_map_lookup_elem(&pw_backend_st, &k);

	return state ? *state : 0;
}

/*
 * Would this tuple still be translated as it was? Its frontend may be gone,
 * new, or another service's by now, and the backend gone from the service.
 * dst and dport are the tuple's, f the entry of its original direction.
 */
__noinline int pw_service_holds(const struct pw_flow_key *k, const struct pw_flow *f)
{
	struct pw_service *svc;

	if (!k || !f)
		return 1;
	svc = pw_service_called(k, &f->from);
	if (!svc)
		return !f->service;
	if (svc->id != f->service)
		return 0;
	if (f->frame)
		return pw_backend_state(&f->nexthop, pw_named_port(f), f->service) != 0;
	return pw_backend_state(&f->dst, f->dport, f->service) != 0;
}

/* loadBalancerSourceRanges: is the client in one of them? */
static __always_inline int pw_in_ranges(__u32 service, const struct pw_addr *client)
{
	struct pw_src_range_key k = { .len = 32 + 128, .service = bpf_htonl(service) };

	__builtin_memcpy(k.addr, client->b, sizeof(k.addr));
	return bpf_map_lookup_elem(&pw_src_ranges, &k) != NULL;
}

/*
 * Equal on every node for the same client, port and backends: where a load
 * balancer sends the rest of a flow makes no difference. The node's address
 * and the service's id, which differ from node to node, have no part in it.
 */
static __always_inline __u32 pw_client_hash(const struct pw_flow_key *call, int sticky)
{
	__u64 h =
		((__u64)(sticky ? 0 : call->sport) << 32) | ((__u32)call->dport << 8) | call->proto;
	int i;

#pragma unroll
	for (i = 0; i < 4; i++)
		h = (h ^ pw_addr_word(&call->src, i)) * 0x9e3779b97f4a7c15ULL;
	return h >> 32;
}

/* A slot of the set, or -1 when its table was replaced meanwhile. */
static __always_inline __s64 pw_pick_slot(const struct pw_flow_key *call,
					  const struct pw_service *svc, int ext)
{
	__u32 count = ext ? svc->ext_count : svc->count, i;
	struct pw_maglev_slots *part;
	struct pw_maglev_key k;

	/* The high half of the product: even to within 1/2^32. */
	if (!ext || !svc->maglev)
		return ((__u64)bpf_get_prandom_u32() * count) >> 32;
	i = pw_client_hash(call, svc->affinity != 0) % svc->maglev;
	k.set = svc->ext_set;
	k.chunk = i / PW_MAGLEV_CHUNK;
	part = bpf_map_lookup_elem(&pw_maglev, &k);
	if (!part)
		return -1;
	return part->slot[i % PW_MAGLEV_CHUNK];
}

/* The set that a caller of this frontend may be kept in. */
static __always_inline __u32 pw_affine_bit(const struct pw_service *svc, int ext)
{
	if (!(svc->flags & PW_SVC_EXTERNAL))
		return PW_BE_IN;
	return ext ? PW_BE_EXT : PW_BE_CLUSTER;
}

static __always_inline struct pw_affinity_entry *pw_affinity_of(const struct pw_affinity_key *k,
								int ext)
{
	if (ext)
		return bpf_map_lookup_elem(&pw_affinity, k);
	return bpf_map_lookup_elem(&pw_affinity_in, k);
}

/* The backend a client has had, if it may have it again. */
static __always_inline int pw_affine(const struct pw_affinity_key *k, const struct pw_service *svc,
				     int ext, struct pw_addr *addr, __u16 *port)
{
	struct pw_affinity_entry *e = pw_affinity_of(k, ext);
	__u64 now = pw_now();

	if (!e || e->last_used + svc->affinity * PW_SEC <= now)
		return 0;
	*addr = e->addr;
	*port = e->port;
	if (!(pw_backend_state(addr, *port, svc->id) & pw_affine_bit(svc, ext)))
		return 0;
	e->last_used = now;
	return 1;
}

static __always_inline void pw_affine_set(const struct pw_affinity_key *k, int ext,
					  const struct pw_addr *addr, __u16 port)
{
	struct pw_affinity_entry e = {
		.addr = *addr,
		.last_used = pw_now(),
		.port = port,
	};

	if (ext)
		bpf_map_update_elem(&pw_affinity, k, &e, BPF_ANY);
	else
		bpf_map_update_elem(&pw_affinity_in, k, &e, BPF_ANY);
}

/* Why a frontend has nobody for its callers. */
static __always_inline int pw_no_backend(const struct pw_service *svc, int ext)
{
	if (svc->flags & (ext ? PW_SVC_NO_LOCAL_EXT : PW_SVC_NO_LOCAL))
		return svc->flags & PW_SVC_EXTERNAL ? PW_DROP_NO_LOCAL_EXTERNAL
						    : PW_DROP_NO_LOCAL_INTERNAL;
	return PW_DROP_NO_BACKEND;
}

/*
 * A backend of the service for a call into addr and port. 0, a reason, or -1:
 * look again. Also of the programs at sockets, which have no scratch.
 */
static __always_inline int pw_service_pick(const struct pw_flow_key *call,
					   const struct pw_service *svc, int ext,
					   struct pw_addr *addr, __u16 *port)
{
	struct pw_affinity_key client = { .client = call->src, .service = svc->id };
	struct pw_backend_key k;
	struct pw_backend *be;
	__s64 slot;

	if (!(ext ? svc->ext_count : svc->count))
		return pw_no_backend(svc, ext);
	if (svc->affinity && pw_affine(&client, svc, ext, addr, port))
		return 0;
	slot = pw_pick_slot(call, svc, ext);
	if (slot < 0)
		return -1;
	k.set = ext ? svc->ext_set : svc->set;
	k.slot = slot;
	be = bpf_map_lookup_elem(&pw_backends, &k);
	if (!be)
		return -1;
	*addr = be->addr;
	*port = be->port;
	if (svc->affinity)
		pw_affine_set(&client, ext, addr, *port);
	return 0;
}

/*
 * The service's part of a decision: sets s->fwd.dst and dport. A set is
 * written whole before a service points at it and outlives the switch, so a
 * miss means that it was replaced between two look-ups: read the service once
 * more. Returns 0 or a reason.
 */
__noinline int pw_select(const struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_service *svc;
	int i, err, ext;

	if (!p || !s)
		return PW_DROP_HELPER;
	s->fwd.dst = p->key.dst;
	s->fwd.dport = p->key.dport;
	s->svc_flags = 0;
	/* The entry node has chosen, and asked for what the service asks. */
	if (p->service == PW_CALL_NAMED) {
		if (!pw_has_ports(p->key.proto))
			return PW_DROP_NO_SERVICE_PORT;
		s->fwd.dst = s->named;
		s->fwd.dport = s->named_port;
		s->fwd.entry = p->from.id;
		s->fwd.flags |= PW_F_XLATE;
		return 0;
	}
	ext = p->from.kind == PW_PLACE_WIRE;
	for (i = 0; i < 2 && pw_has_ports(p->key.proto); i++) {
		svc = pw_service_called(&p->key, &p->from);
		if (!svc)
			break;
		if (svc->flags & PW_SVC_SOURCE_RANGES && !pw_in_ranges(svc->id, &p->key.src))
			return PW_DROP_SOURCE_RANGE;
		err = pw_service_pick(&p->key, svc, ext, &s->fwd.dst, &s->fwd.dport);
		if (err > 0)
			return err;
		if (!err) {
			s->fwd.service = svc->id;
			s->fwd.flags |= PW_F_XLATE;
			s->svc_flags = svc->flags;
			return 0;
		}
		if (i)
			return PW_DROP_NO_BACKEND;
	}
	if (p->from.kind != PW_PLACE_NODE && pw_service_lookup(&p->key.dst, 0, 0))
		return PW_DROP_NO_SERVICE_PORT;
	return 0;
}

#endif
