/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What every hook does with a packet whose place of origin it knows: one
 * look-up and its action when the flow is established, the slow path else.
 */
#ifndef PW_FOLLOW_H
#define PW_FOLLOW_H

#include "answer.h"
#include "decide.h"
#include "deliver.h"
#include "flow.h"
#include "icmp.h"
#include "mss.h"

static __always_inline int pw_is_syn(const struct pw_pkt *p)
{
	return p->key.proto == IPPROTO_TCP &&
	       (p->tcp_flags & (PW_TCP_SYN | PW_TCP_ACK)) == PW_TCP_SYN;
}

/* All that lets an entry speak for a packet without a second thought. */
static __always_inline int pw_current(const struct pw_pkt *p, const struct pw_flow *f)
{
	return f->verdict == PW_VERDICT_ALLOW && pw_same_place(&f->from, &p->from) && pw_fresh(f) &&
	       pw_flow_whole(&p->key, f) &&
	       !(pw_is_syn(p) && (f->service || pw_tcp_closed(f->tcp))) &&
	       f->last_seen + pw_flow_timeout(p->key.proto, f) > pw_now();
}

/*
 * Is a SYN on this flow's tuple the first of a new one? After a closed one,
 * and when its backend is gone.
 */
static __always_inline int pw_syn_starts(const struct pw_pkt *p, const struct pw_flow *f)
{
	if (pw_tcp_closed(f->tcp))
		return 1;
	return f->service && !(f->flags & PW_F_REPLY) && !pw_service_holds(&p->key, f);
}

/* How often a tuple is looked up anew when others are changing it. */
#define PW_TRIES 3

enum pw_review {
	PW_REVIEW_OK = 0,      /* s->fwd is the action */
	/* above: the reason of a drop */
	PW_REVIEW_AGAIN = -1,  /* somebody else is changing it */
	PW_REVIEW_FREE = -2,   /* the tuple is free for a new flow */
};

/*
 * An entry that is there but not current: of another place, outlived, half
 * of a flow, denied or decided from what has changed since.
 */
__noinline int pw_review(struct __sk_buff *skb, struct pw_pkt *p, struct pw_flow *f)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_place from;
	int err;

	if (!p || !f || !s)
		return PW_DROP_HELPER;
	if (!pw_same_place(&f->from, &p->from)) {
		/*
		 * Either a lie, or the address lives elsewhere by now: then
		 * the old flow is over.
		 */
		pw_resolve(&p->key.src, &s->src);
		from = p->from;
		err = pw_check_source(p, &s->src);
		p->from = from;
		if (err)
			return err == PW_DROP_SPOOFED_SOURCE ? PW_DROP_SPOOFED_FLOW : err;
	} else if (!(pw_is_syn(p) && pw_syn_starts(p, f)) &&
		   !pw_flow_expired(&p->key, f, PW_SCRATCH_PACKET) && pw_flow_whole(&p->key, f)) {
		err = 0;
		if (!pw_fresh(f)) {
			pw_count(PW_FLOW_STALE, p->hook, p->v6, skb->len);
			err = pw_redecide(skb, p, f);
		}
		if (!err) {
			s->fwd = *f;
			if (s->fwd.key_hash != pw_key_hash(&p->key))
				return PW_REVIEW_AGAIN;
			if (s->fwd.verdict != PW_VERDICT_ALLOW)
				return s->fwd.reason ?: PW_DROP_HELPER;
			pw_flow_touch(p, &s->fwd, f, skb->len);
			return PW_REVIEW_OK;
		}
	}
	if (!pw_flow_claim(&p->key, f, PW_SCRATCH_PACKET))
		return PW_REVIEW_AGAIN;
	pw_count(PW_FLOW_TAKEN_OVER, p->hook, p->v6, skb->len);
	return PW_REVIEW_FREE;
}

/*
 * Everything but the straight way. The tuple is looked up once more: it may
 * have been promoted between the two tables' look-ups. 0 or a reason.
 */
__noinline int pw_slow(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *f;
	int i, err;

	if (!p || !s)
		return PW_DROP_HELPER;
	for (i = 0; i < PW_TRIES; i++) {
		f = pw_flow_find(pw_key_arg(s, &p->key));
		if (!f)
			break;
		err = pw_review(skb, p, f);
		if (err == PW_REVIEW_FREE)
			break;
		if (err != PW_REVIEW_AGAIN)
			return err;
	}
	if (i == PW_TRIES)
		return PW_DROP_FLOW_INSERT;
	pw_count(PW_FLOW_MISS, p->hook, p->v6, skb->len);
	return pw_decide(skb, p);
}

static __always_inline int pw_follow_error(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	int err = pw_icmp_error(skb, p);

	if (!s)
		return pw_drop(skb, p, PW_DROP_HELPER);
	/* The node's own word to its own pods needs no flow. */
	if (err == PW_DROP_ICMP_UNRELATED && p->from.kind == PW_PLACE_HOST)
		return pw_pass(skb, p);
	if (err)
		return pw_drop(skb, p, err);
	return pw_act(skb, p, &s->fwd, PW_ACT_FIRST);
}

/* Is a packet of the host's own for us, on a device that is not ours? */
static __always_inline int pw_host_follows(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_flow *f;

	if (p->kind == PW_KIND_ICMP_ERROR)
		return pw_error_is_ours(skb, p);
	if (p->kind != PW_KIND_FLOW)
		return 0;
	f = pw_flow_find(&p->key);
	if (f && f->from.kind == PW_PLACE_HOST)
		return 1;
	return pw_service_find(&p->key.dst, p->key.dport, p->key.proto, 0) ||
	       pw_service_lookup(&p->key.dst, 0, 0);
}

/*
 * What enters the tunnel from outside, or leaves by it for there, was made
 * for a way that may be wider: segments are limited by the MSS, and what is
 * too big all the same is answered with the tunnel's MTU. Returns 0 or
 * PW_DROP_TOO_BIG.
 */
__noinline int pw_limit(struct __sk_buff *skb, struct pw_pkt *p, const struct pw_flow *f)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_node *node;
	__u32 id, size;

	if (!p || !f || !s)
		return 0;
	id = f->to.kind == PW_PLACE_NODE ? f->to.id : f->from.id;
	node = bpf_map_lookup_elem(&pw_nodes, &id);
	if (!node || !node->mtu)
		return 0;
	s->mtu = node->mtu;
	if (f->flags & PW_F_CLAMP && pw_clamp_mss(skb, p, s->mtu))
		pw_count(PW_MSS_CLAMPED, p->hook, p->v6, skb->len);
	if (f->to.kind != PW_PLACE_NODE)
		return 0;
	size = skb->gso_size ? skb->gso_size + p->headers : skb->len - ETH_HLEN;
	return size > s->mtu ? PW_DROP_TOO_BIG : 0;
}

/*
 * The action for a packet whose flow is known. One too big that may not be
 * told so, because it may be fragmented, is left to the tunnel's device.
 */
static __always_inline int pw_act_limited(struct __sk_buff *skb, struct pw_pkt *p,
					  const struct pw_flow *f, enum pw_act_mode mode)
{
	if (f->flags & (PW_F_CLAMP | PW_F_TUNNEL) && pw_limit(skb, p, f) && pw_tell_mtu(skb, p))
		return pw_send_back(skb, p);
	return pw_act(skb, p, f, mode);
}

static __always_inline int pw_follow(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *at = NULL;
	int err;

	if (!s)
		return pw_drop(skb, p, PW_DROP_HELPER);
	if (p->kind == PW_KIND_ICMP_ERROR)
		return pw_follow_error(skb, p);
	if (pw_flow_load(&p->key, &s->known, &at) && pw_current(p, &s->known)) {
		pw_flow_touch(p, &s->known, at, skb->len);
		return pw_act_limited(skb, p, &s->known, PW_ACT_KNOWN);
	}
	err = pw_slow(skb, p);
	if (err)
		return pw_answer(skb, p, err);
	return pw_act_limited(skb, p, &s->fwd, PW_ACT_FIRST);
}

#endif
