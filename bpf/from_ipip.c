// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * IPv4 in IPv4 for this node's tunnel address, which from_netdev leaves to
 * this program (see pw_calls). From nodes alone; no kernel device comes after
 * it, so what is a node's and cannot be taken apart is dropped. All else may be
 * a tunnel of the host's own.
 */
#include "follow.h"
#include "ipip.h"

/* Between nodes there may be others' tunnels, too: is it about the cluster? */
static __always_inline int pw_inner_is_ours(const struct pw_pkt *p)
{
	struct pw_peer *src;

	if (bpf_map_lookup_elem(&pw_endpoints, &p->key.dst))
		return 1;
	src = pw_peer_lookup(&p->key.src);
	return src && src->flags;
}

/* The node that the outer source is, 0 = none. */
static __always_inline __u32 pw_outer_id(const struct pw_addr *outer)
{
	__u32 *id = bpf_map_lookup_elem(&pw_node_ids, outer);

	return id ? *id : 0;
}

/*
 * Fills p->from: by the flow's entry, if that is of a node with this address.
 * Returns 0, a reason, or -1: it is not ours. err: why it can't be followed.
 */
static __always_inline int pw_ipip_source(struct pw_pkt *p, const struct pw_addr *outer,
					  const struct pw_flow *f, int err)
{
	struct pw_node *node;
	__u32 id;

	p->from.kind = PW_PLACE_NODE;
	if (f && f->from.kind == PW_PLACE_NODE) {
		p->from.id = f->from.id;
		id = p->from.id;
		node = bpf_map_lookup_elem(&pw_nodes, &id);
		if (node && pw_addr_eq(&node->addr, outer))
			return err;
	}
	p->from.id = pw_outer_id(outer);
	if (!p->from.id || !pw_inner_is_ours(p))
		return -1;
	return err;
}

SEC("tc")
int from_ipip(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *at = NULL;
	struct pw_addr outer;
	__u64 now = pw_now();
	int err, known = 0;
	__u8 ecn;

	if (!s)
		return PW_NEXT;
	err = pw_parse(skb, &p);
	/* Fragments, and options, which no node sends. */
	if (err || p.l4 != PW_HDR_UDP) {
		if (!pw_outer_id(&p.key.src))
			return pw_pass(skb, &p);
		return pw_drop(skb, &p, err ?: PW_DROP_MALFORMED);
	}
	outer = p.key.src;
	ecn = p.ecn;
	__builtin_memset(&p, 0, sizeof(p));
	p.hook = PW_FROM_NETDEV;
	err = pw_parse_v4(skb, &p, PW_IPIP_LEN);
	if (!err && p.kind == PW_KIND_FLOW)
		known = pw_flow_load(&p.key, &s->known, &at);
	err = pw_ipip_source(&p, &outer, known ? &s->known : NULL, err);
	if (err < 0)
		return pw_pass(skb, &p);
	if (!err)
		err = pw_strip_ipip(skb, &p);
	if (!err)
		err = pw_take_ecn(skb, &p, ecn);
	if (err)
		return pw_drop(skb, &p, err);
	/* A known flow's entry may stand; pw_follow reads and judges it again. */
	if (known && s->known.to.kind == PW_PLACE_POD && !pw_expires(&p, &s->known) &&
	    pw_current(&p, &s->known, now) && !pw_flow_touch(&p, &s->known, at, skb->len, now))
		return pw_act(skb, &p, &s->known, NULL);
	p.missed = !at;
	return pw_follow(skb, &p);
}
