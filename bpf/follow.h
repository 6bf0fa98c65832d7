/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What every hook does with a packet whose place of origin it knows: one
 * look-up and its action when the flow is established, the slow path else.
 */
#ifndef PW_FOLLOW_H
#define PW_FOLLOW_H

#include "decide.h"
#include "deliver.h"
#include "flow.h"
#include "icmp.h"

static __always_inline int pw_gen_fresh(const struct pw_gen_ref *ref)
{
	return pw_gen(ref->slot) == ref->gen;
}

static __always_inline int pw_is_syn(const struct pw_pkt *p)
{
	return p->key.proto == IPPROTO_TCP &&
	       (p->tcp_flags & (PW_TCP_SYN | PW_TCP_ACK)) == PW_TCP_SYN;
}

/*
 * Does the entry speak for this packet? If not, it is removed where it has
 * outlived itself, or left for the source check to decide (wrong place).
 */
static __always_inline int pw_usable(struct pw_pkt *p, struct pw_flow *f)
{
	if (f->key_hash != pw_key_hash(&p->key))
		return 0;
	if (!pw_same_place(&f->from, &p->from)) {
		p->wrong_place = 1;
		return 0;
	}
	if ((pw_is_syn(p) && pw_tcp_closed(f->tcp)) || pw_flow_expired(&p->key, f)) {
		pw_flow_forget(&p->key, f);
		return 0;
	}
	return 1;
}

static __noinline int pw_slow(struct __sk_buff *skb, struct pw_pkt *p)
{
	int err;

	if (!p)
		return PW_DROP_HELPER;
	pw_count(PW_FLOW_MISS, p->hook, p->v6, skb->len);
	err = pw_decide(skb, p);
	if (p->wrong_place && err == PW_DROP_SPOOFED_SOURCE)
		err = PW_DROP_SPOOFED_FLOW;
	return err;
}

/* The known flow's packet: fresh, or judged again. 0, a reason, or -1. */
static __always_inline int pw_known(struct __sk_buff *skb, struct pw_pkt *p, struct pw_flow *f)
{
	if (!pw_gen_fresh(&f->src_gen) || !pw_gen_fresh(&f->dst_gen)) {
		pw_count(PW_FLOW_STALE, p->hook, p->v6, skb->len);
		if (pw_redecide(skb, p, f) < 0) {
			pw_flow_forget(&p->key, f);
			return -1;
		}
	}
	if (f->verdict != PW_VERDICT_ALLOW)
		return f->reason;
	pw_count(pw_flow_touch(p, f), p->hook, p->v6, skb->len);
	return 0;
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
	return pw_act(skb, p, &s->fwd, 0);
}

static __always_inline int pw_follow(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s;
	struct pw_flow *f;
	int err;

	if (p->kind == PW_KIND_ICMP_ERROR)
		return pw_follow_error(skb, p);
	f = bpf_map_lookup_elem(&pw_flows, &p->key);
	if (!f)
		f = bpf_map_lookup_elem(&pw_flows_new, &p->key);
	if (f && pw_usable(p, f)) {
		err = pw_known(skb, p, f);
		if (err > 0)
			return pw_drop(skb, p, err);
		if (!err)
			return pw_act(skb, p, f, 1);
	}
	err = pw_slow(skb, p);
	if (err)
		return pw_drop(skb, p, err);
	s = pw_get_scratch();
	if (!s)
		return pw_drop(skb, p, PW_DROP_HELPER);
	return pw_act(skb, p, &s->fwd, 1);
}

#endif
