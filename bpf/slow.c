// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The slow path of every hook, which jumps here (see pw_calls) with its packet
 * in the scratch: a flow's first packet, one that its entry does not speak
 * for, and ICMP errors; fragments, when fragment.c has found their ports.
 */
#include "answer.h"
#include "decide.h"
#include "deliver.h"
#include "filtered.h"
#include "flow.h"
#include "follow.h"
#include "icmp.h"
#include "mss.h"

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
		   (p->service != PW_CALL_NAMED || pw_is_named(s, f)) &&
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
			return pw_flow_touch(p, &s->fwd, f, skb->len, pw_now()) ? PW_REVIEW_AGAIN
										: PW_REVIEW_OK;
		}
	}
	/* The first of its datagram has seen to that. */
	if (p->kind == PW_KIND_LATER)
		return PW_DROP_FRAGMENT;
	if (!pw_flow_claim(&p->key, f, PW_SCRATCH_PACKET))
		return PW_REVIEW_AGAIN;
	pw_count(PW_FLOW_TAKEN_OVER, p->hook, p->v6, skb->len);
	return PW_REVIEW_FREE;
}

/*
 * One try at everything but the straight way: 0, a reason, or PW_REVIEW_AGAIN.
 *
 * look: in the flow tables. A tuple that has just been missed need not be
 * looked up before a flow is made of it: the insert in pw_flow_create finds
 * what another CPU has made, or moved from table to table, meanwhile.
 */
static __always_inline int pw_try(struct __sk_buff *skb, struct pw_pkt *p, int look)
{
	struct pw_flow *f = NULL;
	int err;

	if (look) {
		p->missed = 0;
		f = pw_flow_find(&p->key);
	}
	if (f) {
		err = pw_review(skb, p, f);
		if (err != PW_REVIEW_FREE)
			return err;
	}
	if (p->kind == PW_KIND_LATER)
		return PW_DROP_FRAGMENT;
	pw_count(PW_FLOW_MISS, p->hook, p->v6, skb->len);
	err = pw_decide(skb, p);
	if (err != PW_FLOW_RACE_LOST)
		return err;
	/* A packet of the winner's flow, like any other. */
	f = pw_flow_find(&p->key);
	if (!f)
		return PW_REVIEW_AGAIN;
	err = pw_review(skb, p, f);
	return err == PW_REVIEW_FREE ? PW_REVIEW_AGAIN : err;
}

/* 0 or a reason. */
static __always_inline int pw_slow(struct __sk_buff *skb, struct pw_pkt *p)
{
	int i, err, look;

	/* What makes no flow is not looked up later. */
	look = !p->missed || pw_never_creates(p);
	err = pw_try(skb, p, look);
	/* Nor is what is refused: its flow may have been missed as it was moved. */
	if (err > 0 && !look && pw_flow_find(&p->key))
		err = PW_REVIEW_AGAIN;
#pragma unroll
	for (i = 1; i < PW_TRIES; i++) {
		if (err == PW_REVIEW_AGAIN)
			err = pw_try(skb, p, 1);
	}
	return err == PW_REVIEW_AGAIN ? PW_DROP_FLOW_INSERT : err;
}

/*
 * Up to the stack, out of the reassembly: by the tunnel's device, like what
 * pw_to_host does not leave where it is.
 */
static __always_inline int pw_risen_to_host(struct __sk_buff *skb, struct pw_pkt *p,
					    const struct pw_flow *f)
{
	int err = 0;

	if (f->flags & PW_F_XLATE)
		err = pw_rewrite(skb, p, f, 0, p->kind == PW_KIND_LATER);
	if (err)
		return pw_drop(skb, p, err);
	pw_count(PW_FWD_HOST, p->hook, p->v6, skb->len);
	skb->mark |= cfg_mark;
	return bpf_redirect(cfg_overlay_ifindex, BPF_F_INGRESS);
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
	if (pw_leave(skb, p, &s->fwd))
		return PW_NEXT;
	if (s->fwd.to.kind == PW_PLACE_HOST && pw_is_risen(skb))
		return pw_risen_to_host(skb, p, &s->fwd);
	return pw_act(skb, p, &s->fwd, pw_node_of(&s->fwd));
}

/* Does it get a tunnel header, ours or the device's? */
static __always_inline int pw_takes_tunnel(const struct pw_flow *f)
{
	return f->to.kind == PW_PLACE_NODE && (f->flags & PW_F_TUNNEL || !pw_node_direct(f->to.id));
}

/* Limits the packet, see pw_over_limit. Returns 0 or PW_DROP_TOO_BIG. */
__noinline int pw_limit(struct __sk_buff *skb, struct pw_pkt *p, const struct pw_flow *f)
{
	struct pw_scratch *s = pw_get_scratch();

	if (!p || !f || !s)
		return 0;
	s->mtu = pw_tunnel_mtu(f);
	if (f->flags & PW_F_CLAMP && s->mtu && pw_clamp_mss(skb, p, s->mtu))
		pw_count(PW_MSS_CLAMPED, p->hook, p->v6, skb->len);
	s->mtu = pw_exceeds(skb, p, f);
	return s->mtu ? PW_DROP_TOO_BIG : 0;
}

/* 0, and what is to be done is in s->fwd; or the reason of a drop. */
static __always_inline int pw_find_action(struct __sk_buff *skb, struct pw_pkt *p,
					  struct pw_scratch *s)
{
	if (!p->known)
		return pw_slow(skb, p);
	s->fwd = s->known;
	return 0;
}

SEC("tc")
int slow(struct __sk_buff *skb)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_node *node;
	struct pw_pkt p;
	int err;

	if (!s)
		return PW_SHOT;
	p = s->pkt;
	if (p.kind == PW_KIND_ICMP_ERROR)
		return pw_follow_error(skb, &p);
	err = pw_find_action(skb, &p, s);
	if (err)
		return pw_answer(skb, &p, err);
	/* As a router: first the time, then the size. */
	if (pw_expires(&p, &s->fwd))
		return pw_tell_ttl(skb, &p);
	if (s->fwd.to.kind == PW_PLACE_HOST && pw_is_risen(skb))
		return pw_risen_to_host(skb, &p, &s->fwd);
	node = pw_node_of(&s->fwd);
	if (pw_is_limited(skb, &p, &s->fwd, node) && pw_limit(skb, &p, &s->fwd)) {
		if (pw_tell_mtu(skb, &p))
			return pw_send_back(skb, &p);
		/* The tunnel's device fragments what may not be told so, no other. */
		if (!pw_takes_tunnel(&s->fwd))
			return pw_drop(skb, &p, PW_DROP_TOO_BIG);
	}
	if (pw_leave(skb, &p, &s->fwd))
		return PW_NEXT;
	return pw_act_on(skb, &p, &s->fwd, node, p.kind == PW_KIND_LATER);
}
