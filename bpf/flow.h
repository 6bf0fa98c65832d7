/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow table. Two entries a flow, one per direction, each complete in
 * itself. A flow is born in pw_flows_new, where floods push out only their
 * own kind, and is moved to pw_flows, which never evicts, once its initiator
 * has been seen again after a reply.
 */
#ifndef PW_FLOW_H
#define PW_FLOW_H

#include "maps.h"
#include "parse.h"
#include "resolve.h"
#include "settings.h"

/* Working space of a first packet; programs of one CPU do not interleave. */
struct pw_scratch {
	struct pw_flow fwd;
	struct pw_flow rev;
	struct pw_flow copy;
	struct pw_flow_key rev_key;
	struct pw_flow_key embedded;
	struct pw_target src;
	struct pw_target dst;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pw_scratch);
} pw_scratch SEC(".maps");

static __always_inline struct pw_scratch *pw_get_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pw_scratch, &zero);
}

static __always_inline __u64 pw_now(void)
{
	return bpf_ktime_get_coarse_ns();
}

/* Multiply-and-fold over the key: tells a recycled value from ours. */
static __always_inline __u32 pw_key_hash(const struct pw_flow_key *k)
{
	const __u64 *w = (const __u64 *)k;
	__u64 h = 0;
	int i;

#pragma unroll
	for (i = 0; i < 5; i++)
		h = (h ^ w[i]) * 0x9e3779b97f4a7c15ULL;
	return h >> 32;
}

static __always_inline int pw_tcp_closed(__u8 tcp)
{
	__u8 both = PW_TCP_FIN_ORIG | PW_TCP_FIN_REPLY;

	return (tcp & PW_TCP_RST) || (tcp & both) == both;
}

static __always_inline __u64 pw_flow_timeout(__u8 proto, const struct pw_flow *f)
{
	switch (proto) {
	case IPPROTO_TCP:
		if (pw_tcp_closed(f->tcp))
			return cfg_tcp_closed;
		if (f->tcp)
			return cfg_tcp_half_closed;
		if (f->flags & (PW_F_CONFIRMED | PW_F_MIDSTREAM))
			return cfg_tcp_established;
		return cfg_tcp_new;
	case IPPROTO_UDP:
		return f->flags & PW_F_CONFIRMED ? cfg_udp_stream : cfg_udp_new;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return cfg_icmp;
	default:
		return cfg_other;
	}
}

static __always_inline void pw_twin_key(const struct pw_flow_key *k, const struct pw_flow *f,
					struct pw_flow_key *twin)
{
	twin->src = f->dst;
	twin->dst = f->src;
	twin->sport = f->dport;
	twin->dport = f->sport;
	twin->via = f->twin_via;
	twin->proto = k->proto;
	twin->pad = 0;
}

/* The entry of a key in either table; a value recycled meanwhile is none. */
static __always_inline struct pw_flow *pw_flow_find(const struct pw_flow_key *k)
{
	struct pw_flow *f = bpf_map_lookup_elem(&pw_flows, k);

	if (!f)
		f = bpf_map_lookup_elem(&pw_flows_new, k);
	if (f && f->key_hash != pw_key_hash(k))
		return NULL;
	return f;
}

/* Idle for too long in both directions. */
static __noinline int pw_flow_expired(const struct pw_flow_key *k, const struct pw_flow *f)
{
	struct pw_flow_key twin_key;
	struct pw_flow *twin;
	__u64 now = pw_now(), timeout;

	if (!k || !f)
		return 1;
	timeout = pw_flow_timeout(k->proto, f);
	if (f->last_seen + timeout > now)
		return 0;
	pw_twin_key(k, f, &twin_key);
	twin = pw_flow_find(&twin_key);
	return !twin || twin->last_seen + timeout <= now;
}

/* Removes both directions from both tables. */
static __noinline void pw_flow_forget(const struct pw_flow_key *k, const struct pw_flow *f)
{
	struct pw_flow_key twin_key;

	if (!k || !f)
		return;
	pw_twin_key(k, f, &twin_key);
	bpf_map_delete_elem(&pw_flows, k);
	bpf_map_delete_elem(&pw_flows_new, k);
	bpf_map_delete_elem(&pw_flows, &twin_key);
	bpf_map_delete_elem(&pw_flows_new, &twin_key);
}

/*
 * Moves a flow to pw_flows: reply entry first, so that the original, which
 * decides, never stands there alone. The old copies are left to age.
 * k and f are the original direction's. Returns 0 or -1 when it is full.
 */
static __noinline int pw_flow_confirm(const struct pw_flow_key *k, struct pw_flow *f)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow_key twin_key;
	struct pw_flow *twin;

	if (!k || !f || !s)
		return -1;
	pw_twin_key(k, f, &twin_key);
	twin = bpf_map_lookup_elem(&pw_flows_new, &twin_key);
	if (!twin)
		return -1;
	s->copy = *twin;
	s->copy.flags |= PW_F_CONFIRMED;
	if (bpf_map_update_elem(&pw_flows, &twin_key, &s->copy, BPF_ANY))
		return -1;
	s->copy = *f;
	s->copy.flags |= PW_F_CONFIRMED;
	if (bpf_map_update_elem(&pw_flows, k, &s->copy, BPF_ANY)) {
		bpf_map_delete_elem(&pw_flows, &twin_key);
		return -1;
	}
	return 0;
}

/* FIN and RST act on both entries of a flow. */
static __noinline void pw_flow_tcp(const struct pw_flow_key *k, struct pw_flow *f, __u8 tcp_flags)
{
	struct pw_flow_key twin_key;
	struct pw_flow *twin;
	__u8 bits = 0;

	if (!k || !f)
		return;
	if (tcp_flags & PW_TCP_RST_BIT)
		bits |= PW_TCP_RST;
	if (tcp_flags & PW_TCP_FIN)
		bits |= f->flags & PW_F_REPLY ? PW_TCP_FIN_REPLY : PW_TCP_FIN_ORIG;
	if ((f->tcp & bits) == bits)
		return;
	f->tcp |= bits;
	pw_twin_key(k, f, &twin_key);
	twin = pw_flow_find(&twin_key);
	if (twin)
		twin->tcp |= bits;
}

/* A reply was seen: the original's entry learns of it. */
static __noinline void pw_flow_replied(const struct pw_flow_key *k, struct pw_flow *f)
{
	struct pw_flow_key twin_key;
	struct pw_flow *twin;

	if (!k || !f)
		return;
	f->flags |= PW_F_REPLIED;
	pw_twin_key(k, f, &twin_key);
	twin = bpf_map_lookup_elem(&pw_flows_new, &twin_key);
	if (twin)
		twin->flags |= PW_F_REPLIED;
}

/*
 * Does this packet prove that the initiator heard a reply? TCP: the ACK of
 * the SYN-ACK; a retransmitted SYN (which anyone could send again) does not.
 */
static __always_inline int pw_confirms(const struct pw_pkt *p)
{
	if (p->key.proto == IPPROTO_ICMP || p->key.proto == IPPROTO_ICMPV6)
		return 0; /* an echo costs nothing to forget */
	if (p->key.proto != IPPROTO_TCP)
		return 1;
	return (p->tcp_flags & (PW_TCP_ACK | PW_TCP_SYN | PW_TCP_RST_BIT | PW_TCP_FIN)) ==
	       PW_TCP_ACK;
}

/* Bookkeeping of a known flow's packet. f may be in either table. */
static __always_inline int pw_flow_touch(struct pw_pkt *p, struct pw_flow *f)
{
	f->last_seen = pw_now();
	if (p->key.proto == IPPROTO_TCP && (p->tcp_flags & (PW_TCP_FIN | PW_TCP_RST_BIT)))
		pw_flow_tcp(&p->key, f, p->tcp_flags);
	if (f->flags & PW_F_CONFIRMED)
		return PW_FLOW_HIT;
	if (f->flags & PW_F_REPLY) {
		if (!(f->flags & PW_F_REPLIED))
			pw_flow_replied(&p->key, f);
	} else if ((f->flags & PW_F_REPLIED) && pw_confirms(p)) {
		return pw_flow_confirm(&p->key, f) ? PW_FLOW_TABLE_FULL : PW_FLOW_CONFIRMED;
	}
	return PW_FLOW_HIT_NEW;
}

static __always_inline int pw_same_place(const struct pw_place *a, const struct pw_place *b)
{
	if (a->kind != b->kind)
		return 0;
	/* The wire is one place: replies may arrive by another device. */
	return a->id == b->id || a->kind == PW_PLACE_WIRE;
}

/* An existing reply entry that belongs to the very flow being created. */
static __always_inline int pw_same_origin(const struct pw_flow *a, const struct pw_flow *b)
{
	return a->flags & PW_F_REPLY && pw_addr_eq(&a->src, &b->src) &&
	       pw_addr_eq(&a->dst, &b->dst) && a->sport == b->sport && a->dport == b->dport;
}

/*
 * Puts one entry into pw_flows_new unless a live one is there. An expired
 * one is taken over. Returns 0, 1 (a live one exists) or -1 (no room).
 */
static __noinline int pw_flow_insert(const struct pw_flow_key *k, const struct pw_flow *val)
{
	struct pw_flow *old;

	if (!k || !val)
		return -1;
	old = pw_flow_find(k);
	if (old) {
		if (!pw_flow_expired(k, old))
			return 1;
		pw_flow_forget(k, old);
	}
	if (!bpf_map_update_elem(&pw_flows_new, k, val, BPF_NOEXIST))
		return 0;
	return bpf_map_lookup_elem(&pw_flows_new, k) ? 1 : -1;
}

/*
 * Writes both entries of a new flow: s->fwd under key, s->rev under
 * s->rev_key. The insert of the forward entry decides between two CPUs that
 * create the same flow; the loser takes its reverse entry back. Returns the
 * reason to count: created, race lost (use the winner's entry), or a drop.
 */
static __noinline int pw_flow_create(const struct pw_flow_key *key, struct pw_scratch *s)
{
	struct pw_flow *old;
	int err;

	if (!key || !s)
		return PW_DROP_FLOW_INSERT;
	s->fwd.key_hash = pw_key_hash(key);
	s->rev.key_hash = pw_key_hash(&s->rev_key);
	err = pw_flow_insert(&s->rev_key, &s->rev);
	if (err < 0)
		return PW_DROP_FLOW_INSERT;
	if (err == 1) {
		old = pw_flow_find(&s->rev_key);
		if (!old || !pw_same_origin(old, &s->rev))
			return PW_DROP_FLOW_COLLISION;
	}
	switch (pw_flow_insert(key, &s->fwd)) {
	case 0:
		return PW_FLOW_CREATED;
	case 1:
		if (!err) {
			/* Not if the winner's reply tuple is the same one. */
			old = pw_flow_find(key);
			if (!old || !pw_addr_eq(&old->dst, &s->fwd.dst) ||
			    old->dport != s->fwd.dport)
				bpf_map_delete_elem(&pw_flows_new, &s->rev_key);
		}
		return PW_FLOW_RACE_LOST;
	default:
		if (!err)
			bpf_map_delete_elem(&pw_flows_new, &s->rev_key);
		return PW_DROP_FLOW_INSERT;
	}
}

#endif
