/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Telling of drops: one event for a flow, again when it still tries some
 * seconds later, and so many a second and CPU. Nobody waits for whoever reads:
 * what there is no room for is lost, and counted.
 */
#ifndef PW_EVENT_H
#define PW_EVENT_H

#include "metrics.h"
#include "rate.h"
#include "resolve.h"
#include "scratch.h"

#define PW_EVENT_BURST 100
#define PW_EVENT_AGAIN (5 * PW_SEC)

static __always_inline int pw_is_denial(__u32 reason)
{
	return reason == PW_DROP_POLICY_EGRESS || reason == PW_DROP_POLICY_INGRESS;
}

/*
 * What the policies were asked about: the original direction's packets, after
 * translation. s->fwd is the decision, or the entry, that denies this packet.
 */
static __always_inline void pw_event_judged(struct pw_event *e, struct pw_scratch *s)
{
	if (s->fwd.flags & PW_F_REPLY) {
		e->src = s->fwd.dst;
		e->dst = e->key.src;
		e->dport = e->key.sport;
	} else {
		e->dst = s->fwd.dst;
		e->dport = s->fwd.dport;
	}
	e->rule = s->fwd.rule;
	e->service = s->fwd.service;
}

/* The packet ends here, so the scratch is free but for what was decided. */
__noinline int pw_tell(const struct pw_pkt *p, __u32 reason)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_told *told;
	struct pw_event *e;
	__u32 hash;

	/* Multicast is every pod's own noise. */
	if (!p || !s || !cfg_events_per_sec || reason == PW_DROP_MULTICAST)
		return 0;
	hash = pw_key_hash(&p->key) ^ reason;
	told = &s->told[hash % PW_TOLD];
	if (told->hash == hash && pw_now() < told->until)
		return 0;
	/* Other drops, which a scan makes at will, leave denials their share. */
	if (!pw_within(&s->event_due[pw_is_denial(reason)], cfg_events_per_sec, PW_EVENT_BURST))
		goto lost;
	e = bpf_ringbuf_reserve(&pw_events, sizeof(*e), 0);
	if (!e)
		goto lost;
	__builtin_memset(e, 0, sizeof(*e));
	e->time = pw_now();
	e->key = p->key;
	e->from = p->from;
	e->reason = reason;
	e->hook = p->hook;
	e->v6 = p->v6;
	e->src = e->key.src;
	e->dst = e->key.dst;
	e->dport = e->key.dport;
	if (pw_is_denial(reason))
		pw_event_judged(e, s);
	pw_resolve(&e->src, &s->src);
	pw_resolve(&e->dst, &s->dst);
	e->src_identity = s->src.identity;
	e->dst_identity = s->dst.identity;
	if (reason == PW_DROP_POLICY_EGRESS)
		e->table = s->src.policy_out;
	if (reason == PW_DROP_POLICY_INGRESS)
		e->table = s->dst.policy_in;
	bpf_ringbuf_submit(e, 0);
	told->hash = hash;
	told->until = pw_now() + PW_EVENT_AGAIN;
	return 0;
lost:
	pw_count(PW_EVENT_LOST, p->hook, p->v6, 0);
	return 0;
}

#endif
