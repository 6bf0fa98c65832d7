// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Fragments, from every hook, which jump here (see pw_calls) with the packet in
 * the scratch. What is followed goes on in slow.c.
 */
#include "event.h"
#include "filtered.h"
#include "frag.h"

/* What becomes of a fragment, unless it is the reason of a drop. */
enum pw_frag_act {
	PW_FRAG_FOLLOW = 0, /* in slow.c */
	PW_FRAG_PASS = -1,  /* not ours */
	PW_FRAG_RISE = -2,  /* to the kernel's reassembly, by the token in the scratch */
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
	int err;

	/* Whatever it is, the others are there. */
	if (state == PW_FRAG_STACK) {
		err = pw_frag_may_rise(p);
		return err ?: PW_FRAG_RISE;
	}
	err = pw_frag_ports(skb, p, fr);
	if (!err && p->kind != PW_KIND_FLOW)
		err = PW_DROP_FRAGMENT;
	if (err && !pw_frag_is_hosts(p))
		return err;
	/* What we cannot read may be the host's all the same. */
	if (err || pw_frag_leave(skb, p)) {
		/* What the host sends is in order: nothing but an older one's needs to go. */
		if (state || p->hook == PW_FROM_NETDEV)
			pw_frag_store(s, PW_FRAG_HOST);
		return PW_FRAG_PASS;
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
	int err, hosts;

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
	hosts = pw_frag_is_hosts(p);
	/* What is risen is in order, and so is what the stack sends. */
	if (s->frag_key.risen || !pw_is_ingress(p))
		return hosts ? PW_FRAG_PASS : PW_DROP_FRAGMENT_BEFORE_FIRST;
	if (hosts && (state == PW_FRAG_HOST || state == PW_FRAG_SPLIT))
		return PW_FRAG_PASS;
	err = pw_frag_may_rise(p);
	/*
	 * Of a liar nothing is kept, unless it is the host's to judge. What rises
	 * has a token of its own: what did not rise before has none, but that of
	 * another datagram may stand where it was written down.
	 */
	if (state != PW_FRAG_STACK &&
	    (!err || (!state && (err == PW_DROP_FRAGMENT_BEFORE_FIRST || hosts)))) {
		s->frag.token = bpf_get_prandom_u32() | 1;
		pw_frag_store(s, err ? PW_FRAG_SPLIT : PW_FRAG_STACK);
	}
	if (err)
		return hosts ? PW_FRAG_PASS : err;
	return PW_FRAG_RISE;
}

static __always_inline int pw_frag_sort(struct __sk_buff *skb, struct pw_pkt *p,
					struct pw_scratch *s)
{
	struct pw_fragment fr = {};
	int err = pw_frag_from(skb, p);

	/* What is risen may be small enough to come back in one piece. */
	if (!err && p->kind == PW_KIND_LINK)
		err = PW_DROP_MULTICAST;
	if (!err && p->kind != PW_KIND_NONE)
		return pw_frag_leave(skb, p) ? PW_FRAG_PASS : PW_FRAG_FOLLOW;
	if (!err)
		err = pw_frag_parse(skb, p, &fr);
	if (err)
		return pw_frag_is_hosts(p) ? PW_FRAG_PASS : err;
	pw_frag_name(s, p, fr.id, pw_is_risen(skb));
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
		return pw_is_risen(skb) ? pw_frag_return(skb, &p, s) : pw_pass(skb, &p);
	case PW_FRAG_RISE:
		if (p.from.flags & PW_PLACE_FILTERED) {
			pw_to_filters(skb);
			return PW_NEXT;
		}
		return pw_frag_rise(skb, &p, s);
	}
	pw_tell(&p, act);
	return pw_drop(skb, &p, act);
}
