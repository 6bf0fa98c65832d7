/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow table. Two entries a flow, one per direction, each complete in
 * itself. A flow is born in pw_flows_new, where floods push out only their
 * own kind, and is moved to pw_flows, which never evicts, once its initiator
 * has been seen again after a reply.
 */
#ifndef PW_FLOW_H
#define PW_FLOW_H

#include "churn.h"
#include "maps.h"
#include "metrics.h"
#include "parse.h"
#include "scratch.h"
#include "settings.h"

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

/*
 * The entry of a key in either table; a value recycled meanwhile is none. One
 * that is just being moved may be missed: for those who look again.
 */
static __always_inline struct pw_flow *pw_flow_peek(const struct pw_flow_key *k)
{
	struct pw_flow *f = bpf_map_lookup_elem(&pw_flows, k);

	if (!f)
		f = bpf_map_lookup_elem(&pw_flows_new, k);
	if (f && f->key_hash != pw_key_hash(k))
		return NULL;
	return f;
}

/* The same, not to be missed: it was moved between the two, if not there. */
static __always_inline struct pw_flow *pw_flow_find(const struct pw_flow_key *k)
{
	struct pw_flow *f = pw_flow_peek(k);

	if (f)
		return f;
	f = bpf_map_lookup_elem(&pw_flows, k);
	return f && f->key_hash == pw_key_hash(k) ? f : NULL;
}

/*
 * The same, copied out: values of a hash map are recycled without a grace
 * period, so the copy is checked, not the original. *at is for bookkeeping.
 */
static __always_inline int pw_flow_load(const struct pw_flow_key *k, struct pw_flow *copy,
					struct pw_flow **at)
{
	struct pw_flow *f = bpf_map_lookup_elem(&pw_flows, k);

	if (!f)
		f = bpf_map_lookup_elem(&pw_flows_new, k);
	if (!f)
		return 0;
	*copy = *f;
	*at = f;
	return copy->key_hash == pw_key_hash(k);
}

/* Does the other direction's entry t name k? */
static __always_inline int pw_names(const struct pw_flow *t, const struct pw_flow_key *k)
{
	return pw_addr_eq(&t->src, &k->dst) && pw_addr_eq(&t->dst, &k->src) &&
	       t->sport == k->dport && t->dport == k->sport && t->twin_via == k->via;
}

/*
 * The entry of the other direction, its key in *twin. Both must name each
 * other: when a flood has pushed an original out and the initiator got
 * another backend since, the new flow stands where the old one's would.
 */
static __always_inline struct pw_flow *pw_twin_find(const struct pw_flow_key *k,
						    const struct pw_flow *f,
						    struct pw_flow_key *twin)
{
	struct pw_flow *t;

	pw_twin_key(k, f, twin);
	t = pw_flow_find(twin);
	return t && pw_names(t, k) ? t : NULL;
}

/*
 * Most of what the host says and hears itself is in no flow. Would the answers
 * to this packet, which the host sends if it is from outside, be taken for
 * another's, because a flow that is translated, or that another node sent
 * here, has their tuple? Then it must become a flow, under another source
 * port. TCP: as far as it starts something.
 */
__noinline int pw_answers_taken(const struct pw_flow_key *k, __u8 tcp_flags, int outside)
{
	struct pw_flow_key answer = {};
	struct pw_flow *f;

	if (!k ||
	    (k->proto == IPPROTO_TCP && (tcp_flags & (PW_TCP_SYN | PW_TCP_ACK)) != PW_TCP_SYN))
		return 0;
	answer.src = k->dst;
	answer.dst = k->src;
	answer.sport = k->dport;
	answer.dport = k->sport;
	answer.proto = k->proto;
	f = pw_flow_find(&answer);
	return f && f->flags & PW_F_REPLY && f->flags & (PW_F_XLATE | PW_F_TUNNEL) &&
	       (!outside || f->from.kind == PW_PLACE_HOST);
}

/* Idle for too long in both directions. */
__noinline int pw_flow_expired(const struct pw_flow_key *k, const struct pw_flow *f, __u32 who)
{
	struct pw_scratch *s = pw_get_scratch_of(who);
	struct pw_flow *twin;
	__u64 now = pw_now(), timeout;

	if (!k || !f || !s)
		return 1;
	timeout = pw_flow_timeout(k->proto, f);
	if (f->last_seen + timeout > now)
		return 0;
	twin = pw_twin_find(k, f, &s->twin);
	return !twin || twin->last_seen + timeout <= now;
}

/* Is the other direction's entry still there, in either table? */
__noinline int pw_flow_has_twin(const struct pw_flow_key *k, const struct pw_flow *f)
{
	struct pw_scratch *s = pw_get_scratch();

	if (!k || !f || !s)
		return 0;
	return pw_twin_find(k, f, &s->twin) != NULL;
}

/*
 * A flood may have pushed the reply entry of an unconfirmed flow out. What
 * is left of it would send packets whose answers nobody knows.
 */
static __always_inline int pw_flow_whole(const struct pw_flow_key *k, const struct pw_flow *f)
{
	return f->flags & (PW_F_CONFIRMED | PW_F_REPLY) || pw_flow_has_twin(k, f);
}

/* What may be left in the other table goes first: nobody may take it for the flow. */
static __always_inline void pw_flow_delete(const struct pw_flow_key *k)
{
	pw_new_delete(k);
	bpf_map_delete_elem(&pw_flows, k);
}

/*
 * Removes an outlived flow, both directions, from both tables. Of several
 * CPUs that want to, exactly one may: the one that takes the hash out of the
 * original direction's entry. Returns 1 to it and 0 to the others, who look
 * the tuple up again. The reply entry goes first, so that a flow whose
 * original is gone is gone altogether.
 */
__noinline int pw_flow_claim(const struct pw_flow_key *k, struct pw_flow *f, __u32 who)
{
	struct pw_scratch *s = pw_get_scratch_of(who);
	struct pw_flow *twin, *orig;
	__u64 created;
	__u32 hash;

	if (!k || !f || !s)
		return 0;
	created = f->created;
	twin = pw_twin_find(k, f, &s->twin);
	orig = f;
	hash = pw_key_hash(k);
	if (f->flags & PW_F_REPLY && twin) {
		orig = twin;
		hash = pw_key_hash(&s->twin);
	}
	if (__sync_val_compare_and_swap(&orig->key_hash, hash, 0) != hash)
		return 0;
	if (orig->created != created) {
		/* Another flow of the same tuple by now, and not outlived. */
		orig->key_hash = hash;
		return 0;
	}
	if (orig == f) {
		if (twin) {
			twin->key_hash = 0;
			pw_flow_delete(&s->twin);
		}
		pw_flow_delete(pw_key_arg(s, k));
	} else {
		f->key_hash = 0;
		pw_flow_delete(pw_key_arg(s, k));
		pw_flow_delete(&s->twin);
	}
	return 1;
}

/* Another CPU may be promoting the same flow: then it is done. */
static __always_inline int pw_flow_promote(const struct pw_flow_key *k, const struct pw_flow *val)
{
	if (!bpf_map_update_elem(&pw_flows, k, val, BPF_NOEXIST))
		return 0;
	return bpf_map_lookup_elem(&pw_flows, k) ? 0 : -1;
}

/* What pw_flow_confirm returns, unless it is a reason to count. */
enum pw_confirm {
	PW_BUSY = 0,  /* another CPU is doing it, or has just done it */
	PW_HALF = -1, /* there is no twin, see pw_flow_whole */
};

/*
 * Of several CPUs that want to move a flow exactly one may, or one would take
 * back the reply entry that another relies on, because the table is full. It
 * is never given back for what is moved: the copy is about to go.
 */
static __always_inline int pw_flow_seize(struct pw_flow *f)
{
	__u32 *word = (__u32 *)&f->entry;
	union {
		struct {
			__u16 entry;
			__u8 frame;
			__u8 moving;
		};
		__u32 word;
	} old = { .entry = f->entry, .frame = f->frame }, new = old;

	PW_ASSERT_SIZE(old, sizeof(old.word));
	new.moving = 1;
	return __sync_val_compare_and_swap(word, old.word, new.word) == old.word;
}

/*
 * Moves a flow to pw_flows: reply entry first, so that the original, which
 * decides, never stands there alone. The old copies go when both are there:
 * left to age, those of all that lives would fill pw_flows_new, where every
 * insert would have to push one out first and every miss to pass some by.
 */
static __always_inline int pw_flow_move(struct pw_scratch *s, const struct pw_flow_key *k,
					struct pw_flow *f)
{
	struct pw_flow_key *twin_key = &s->twin;
	struct pw_flow *twin;
	int was_there = 0;

	pw_twin_key(k, f, twin_key);
	twin = bpf_map_lookup_elem(&pw_flows_new, twin_key);
	if (twin)
		s->copy = *twin;
	if (!twin || s->copy.key_hash != pw_key_hash(twin_key) || !pw_names(&s->copy, k)) {
		/* It may be there from an earlier flow, see pw_flow_reserve. */
		was_there = pw_flow_has_twin(k, f);
		if (!was_there)
			return PW_HALF;
	} else {
		s->copy.flags |= PW_F_CONFIRMED;
		if (pw_flow_promote(twin_key, &s->copy))
			return PW_FLOW_TABLE_FULL;
	}
	s->copy = *f;
	s->copy.flags |= PW_F_CONFIRMED;
	s->copy.moving = 0;
	/* The hash differs: pushed out meanwhile, or over. */
	if (s->copy.key_hash != pw_key_hash(k) || pw_flow_promote(pw_key_arg(s, k), &s->copy)) {
		if (!was_there)
			bpf_map_delete_elem(&pw_flows, twin_key);
		return PW_FLOW_TABLE_FULL;
	}
	/* Claimed by a CPU that may not have found what is there now, see pw_flow_claim. */
	if (!f->key_hash) {
		pw_flow_delete(twin_key);
		pw_flow_delete(&s->arg);
		return PW_BUSY;
	}
	pw_new_delete(&s->arg);
	pw_new_delete(twin_key);
	return PW_FLOW_CONFIRMED;
}

/* Moves a flow to pw_flows. k and f are the original direction's. */
__noinline int pw_flow_confirm(const struct pw_flow_key *k, struct pw_flow *f)
{
	struct pw_scratch *s = pw_get_scratch();
	int moved;

	if (!k || !f || !s)
		return PW_FLOW_TABLE_FULL;
	if (!pw_flow_seize(f))
		return PW_BUSY;
	moved = pw_flow_move(s, k, f);
	if (moved != PW_FLOW_CONFIRMED)
		f->moving = 0;
	return moved;
}

/* FIN and RST act on both entries of a flow. */
__noinline int pw_flow_tcp(const struct pw_flow_key *k, struct pw_flow *f, __u8 tcp_flags)
{
	struct pw_flow_key twin_key;
	struct pw_flow *twin;
	__u8 bits = 0;

	if (!k || !f)
		return 0;
	if (tcp_flags & PW_TCP_RST_BIT)
		bits |= PW_TCP_RST;
	if (tcp_flags & PW_TCP_FIN)
		bits |= f->flags & PW_F_REPLY ? PW_TCP_FIN_REPLY : PW_TCP_FIN_ORIG;
	if ((f->tcp & bits) == bits)
		return 0;
	f->tcp |= bits;
	twin = pw_twin_find(k, f, &twin_key);
	if (twin)
		twin->tcp |= bits;
	return 0;
}

/* A reply was seen: the original's entry learns of it. */
__noinline int pw_flow_replied(const struct pw_flow_key *k, struct pw_flow *f)
{
	struct pw_flow_key twin_key;
	struct pw_flow *twin;

	if (!k || !f)
		return 0;
	f->flags |= PW_F_REPLIED;
	/* It is where f is, most likely. */
	pw_twin_key(k, f, &twin_key);
	twin = bpf_map_lookup_elem(&pw_flows_new, &twin_key);
	if (!twin || twin->key_hash != pw_key_hash(&twin_key) || !pw_names(twin, k))
		twin = pw_twin_find(k, f, &twin_key);
	if (twin)
		twin->flags |= PW_F_REPLIED;
	return 0;
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

/* Will this packet of the flow move it to pw_flows? */
static __always_inline int pw_promotes(const struct pw_pkt *p, const struct pw_flow *f)
{
	return (f->flags & (PW_F_CONFIRMED | PW_F_REPLY | PW_F_REPLIED)) == PW_F_REPLIED &&
	       pw_confirms(p);
}

/*
 * Bookkeeping of a known flow's packet: f is the copy it is handled by, at
 * the entry in either table. 0, or not: there is half a flow, and the entry
 * does not speak for the packet.
 */
static __always_inline int pw_flow_touch(const struct pw_pkt *p, const struct pw_flow *f,
					 struct pw_flow *at, __u32 len, __u64 now)
{
	int moved;

	at->last_seen = now;
	if (pw_promotes(p, f)) {
		moved = pw_flow_confirm(&p->key, at);
		if (moved == PW_HALF)
			return -1;
		if (moved != PW_BUSY)
			pw_count(moved, p->hook, p->v6, len);
	}
	if (p->key.proto == IPPROTO_TCP && (p->tcp_flags & (PW_TCP_FIN | PW_TCP_RST_BIT)))
		pw_flow_tcp(&p->key, at, p->tcp_flags);
	if (f->flags & PW_F_CONFIRMED) {
		pw_count(PW_FLOW_HIT, p->hook, p->v6, len);
		return 0;
	}
	pw_count(PW_FLOW_HIT_NEW, p->hook, p->v6, len);
	if ((f->flags & (PW_F_REPLY | PW_F_REPLIED)) == PW_F_REPLY)
		pw_flow_replied(&p->key, at);
	return 0;
}

static __always_inline int pw_same_place(const struct pw_place *a, const struct pw_place *b)
{
	if (a->kind == PW_PLACE_NODE && b->kind == PW_PLACE_WIRE)
		return pw_node_plain(a->id);
	if (a->kind != b->kind)
		return 0;
	/* The wire is one place: replies may arrive by another device. */
	return a->id == b->id || a->kind == PW_PLACE_WIRE;
}

#endif
