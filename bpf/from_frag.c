// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc ingress of podweir.frag: what the kernel has put in order. It becomes
 * again what it was at the hook that sent it there, and goes on from there.
 */
#include "follow.h"
#include "frag.h"

/* What the token in the frame stands for, copied into the scratch; 0 = nothing. */
static __always_inline int pw_frag_recall(struct __sk_buff *skb, const struct pw_pkt *p,
					  struct pw_scratch *s)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct pw_frag_origin *o;
	struct ethhdr *eth = data;
	__u32 token;

	if ((void *)(eth + 1) > end)
		return 0;
	__builtin_memcpy(&token, eth->h_source + PW_TOKEN_AT, 4);
	o = bpf_map_lookup_elem(&pw_frag_origins, &token);
	if (!o || !pw_addr_eq(&o->key.src, &p->key.src) || !pw_addr_eq(&o->key.dst, &p->key.dst))
		return 0;
	s->origin = *o;
	__builtin_memcpy(eth->h_dest, o->dst_mac, 6);
	__builtin_memcpy(eth->h_source, o->src_mac, 6);
	return 1;
}

SEC("tc")
int from_frag(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_FRAG };
	struct pw_scratch *s = pw_get_scratch();
	struct pw_frag_origin *o;
	int err;

	if (!s)
		return PW_SHOT;
	err = pw_parse(skb, &p);
	/* The link's own. */
	if (skb->pkt_type != PW_PACKET_HOST)
		return PW_SHOT;
	if (err)
		p.kind = PW_KIND_NONE;
	if (!pw_frag_recall(skb, &p, s))
		return pw_drop(skb, &p, PW_DROP_FRAGMENT);
	o = &s->origin;
	if (pw_set_ttl(skb, &p, o->ttl))
		return pw_drop(skb, &p, PW_DROP_HELPER);
	p.hook = o->key.hook;
	p.from.kind = o->key.kind;
	p.from.id = o->key.kind == PW_PLACE_WIRE ? o->device : o->key.place;
	p.key.via = o->key.via;
	p.service = o->service;
	p.ttl = o->ttl;
	s->named = o->named;
	s->named_port = o->named_port;
	return pw_go_fragment(skb, &p);
}
