// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Fragments, from every hook, which jump here (see pw_calls) with the packet in
 * the scratch. What is followed goes on in slow.c.
 */
#include "event.h"
#include "frag.h"

/* What becomes of a fragment, unless it is the reason of a drop. */
enum pw_frag_act {
	PW_FRAG_FOLLOW = 0, /* in slow.c */
	PW_FRAG_PASS = -1,  /* not ours */
	PW_FRAG_RISE = -2,  /* to the kernel's reassembly */
};

/* A hook that the host's own packets pass, too; from_netdev: to whom no pod is. */
static __always_inline int pw_frag_is_hosts(const struct pw_pkt *p)
{
	if (p->hook == PW_TO_NETDEV || p->hook == PW_TO_LO)
		return p->from.kind != PW_PLACE_POD && p->from.kind != PW_PLACE_NODE;
	return p->hook == PW_FROM_NETDEV && !bpf_map_lookup_elem(&pw_endpoints, &p->key.dst);
}

/* Is the datagram, whose ports are known now, not for us? */
static __always_inline int pw_frag_leave(struct __sk_buff *skb, struct pw_pkt *p)
{
	if (!pw_frag_is_hosts(p))
		return 0;
	if (p->hook == PW_FROM_NETDEV)
		return pw_is_vxlan(p) || !pw_is_ours(skb, p);
	return p->from.kind != PW_PLACE_HOST || !pw_host_follows(skb, p);
}

static __always_inline int pw_frag_first(struct __sk_buff *skb, struct pw_pkt *p,
					 struct pw_scratch *s, const struct pw_fragment *fr)
{
	__u32 state = pw_frag_load(s);
	int err = pw_frag_ports(skb, p, fr);

	if (!err && p->kind != PW_KIND_FLOW)
		err = PW_DROP_FRAGMENT;
	if (err)
		return pw_frag_is_hosts(p) ? PW_FRAG_PASS : err;
	if (pw_frag_leave(skb, p)) {
		/* What the host sends is in order: nothing but an older one's needs to go. */
		if (state || p->hook == PW_FROM_NETDEV)
			pw_frag_store(s, PW_FRAG_HOST);
		return PW_FRAG_PASS;
	}
	if (state == PW_FRAG_STACK) {
		err = pw_frag_may_rise(skb, p);
		return err ?: PW_FRAG_RISE;
	}
	/* Nobody will ever have all of it. */
	if (state == PW_FRAG_SPLIT)
		return PW_DROP_FRAGMENT_BEFORE_FIRST;
	s->frag.sport = p->key.sport;
	s->frag.dport = p->key.dport;
	s->frag.proto = p->key.proto;
	s->frag.head = pw_frag_head(p, fr);
	pw_frag_store(s, PW_FRAG_PORTS);
	p->kind = PW_KIND_FIRST;
	return PW_FRAG_FOLLOW;
}

static __always_inline int pw_frag_later(struct __sk_buff *skb, struct pw_pkt *p,
					 struct pw_scratch *s, const struct pw_fragment *fr)
{
	__u32 state = pw_frag_load(s);
	int err;

	if (state == PW_FRAG_PORTS) {
		/* Nothing may be put over what was judged. */
		if (fr->off < s->frag.head)
			return PW_DROP_MALFORMED;
		p->key.sport = s->frag.sport;
		p->key.dport = s->frag.dport;
		p->key.proto = s->frag.proto;
		p->kind = PW_KIND_LATER;
		return PW_FRAG_FOLLOW;
	}
	if (pw_frag_is_hosts(p)) {
		if (!state && p->hook == PW_FROM_NETDEV)
			pw_frag_store(s, PW_FRAG_SPLIT);
		return PW_FRAG_PASS;
	}
	/* The stack sends in order. */
	err = pw_is_ingress(p) ? pw_frag_may_rise(skb, p) : PW_DROP_FRAGMENT_BEFORE_FIRST;
	/* Of a liar nothing is kept. */
	if (!state && (!err || err == PW_DROP_FRAGMENT_BEFORE_FIRST))
		pw_frag_store(s, err ? PW_FRAG_SPLIT : PW_FRAG_STACK);
	return err ?: PW_FRAG_RISE;
}

static __always_inline int pw_frag_sort(struct __sk_buff *skb, struct pw_pkt *p,
					struct pw_scratch *s)
{
	struct pw_fragment fr = {};
	int err = pw_frag_origin(skb, p, s);

	/* What was up may be small enough to come back in one piece. */
	if (!err && p->kind == PW_KIND_LINK)
		err = PW_DROP_MULTICAST;
	if (!err && p->kind != PW_KIND_NONE)
		return pw_frag_is_hosts(p) ? PW_FRAG_PASS : PW_FRAG_FOLLOW;
	if (!err)
		err = pw_frag_parse(skb, p, &fr);
	if (err)
		return pw_frag_is_hosts(p) ? PW_FRAG_PASS : err;
	pw_frag_name(s, p, fr.id);
	return fr.off ? pw_frag_later(skb, p, s, &fr) : pw_frag_first(skb, p, s, &fr);
}

SEC("tc")
int fragment(struct __sk_buff *skb)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_pkt p;
	int act;

	if (!s)
		return PW_SHOT;
	p = s->pkt;
	act = pw_frag_sort(skb, &p, s);
	switch (act) {
	case PW_FRAG_FOLLOW:
		return pw_go_slow(skb, &p, s);
	case PW_FRAG_PASS:
		return pw_pass(skb, &p);
	case PW_FRAG_RISE:
		pw_count(PW_FRAGMENT_REASSEMBLY, p.hook, p.v6, skb->len);
		skb->tc_index = PW_FRAG_TAG;
		pw_make_ours(skb);
		pw_stay(skb, &p);
		return pw_pass(skb, &p);
	}
	pw_tell(&p, act);
	return pw_drop(skb, &p, act);
}
