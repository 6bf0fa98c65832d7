// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Run by the podweir command, never attached: may one address talk to
 * another, and which rule says so? The "packet" is an Ethernet header and a
 * struct pw_ask, which is answered in place by the functions that decide
 * first packets, over the same maps. Nothing is written, counted or
 * remembered; that is why a service's backend is not chosen but asked for.
 * One at a time: the caller sees to it, see package maps.
 */
#include "decide.h"

/* Where the packets of a source come from. */
static __always_inline void pw_ask_from(const struct pw_target *src, struct pw_place *from)
{
	if (src->ifindex) {
		from->kind = PW_PLACE_POD;
		from->id = src->ifindex;
	} else if (src->flags & PW_PEER_HOST) {
		from->kind = PW_PLACE_HOST;
	} else if (src->node) {
		from->kind = PW_PLACE_NODE;
		from->id = src->node;
	} else {
		from->kind = PW_PLACE_WIRE;
	}
}

/* pw_select with the choice left to the one who asks. */
static __always_inline int pw_ask_service(struct pw_ask *a, const struct pw_pkt *p,
					  struct pw_flow *fwd)
{
	int ext = p->from.kind == PW_PLACE_WIRE;
	struct pw_service *svc = NULL;
	struct pw_backend_key k;
	struct pw_backend *be;

	if (p->from.kind == PW_PLACE_NODE)
		return 0;
	if (pw_has_ports(p->key.proto))
		svc = pw_service_find(&p->key.dst, p->key.dport, p->key.proto, ext);
	if (!svc)
		return pw_service_lookup(&p->key.dst, 0, 0) ? PW_DROP_NO_SERVICE_PORT : 0;
	a->service = fwd->service = svc->id;
	if (svc->flags & PW_SVC_SOURCE_RANGES && !pw_in_ranges(svc->id, &p->key.src))
		return PW_DROP_SOURCE_RANGE;
	a->backends = ext ? svc->ext_count : svc->count;
	if (!a->backends)
		return pw_no_backend(svc, ext);
	k.set = ext ? svc->ext_set : svc->set;
	k.slot = a->slot;
	be = bpf_map_lookup_elem(&pw_backends, &k);
	if (!be)
		return PW_DROP_NO_BACKEND;
	fwd->dst = be->addr;
	fwd->dport = be->port;
	return 0;
}

static __always_inline void pw_ask_half(struct pw_ask_half *h, __u32 table, __u32 identity,
					__u8 proto, __u16 port)
{
	h->table = table;
	h->identity = identity;
	h->verdict = pw_policy_verdict(table, identity, proto, port, &h->rule);
}

/* The steps of pw_decide, up to the verdict. */
static __always_inline int pw_ask_decide(struct __sk_buff *skb, struct pw_ask *a, struct pw_pkt *p,
					 struct pw_scratch *s)
{
	int err;

	__builtin_memset(&s->fwd, 0, sizeof(s->fwd));
	pw_resolve(&p->key.src, &s->src);
	pw_ask_from(&s->src, &p->from);
	a->from = p->from;
	a->device = p->from.kind == PW_PLACE_POD ? p->from.id : cfg_overlay_ifindex;
	s->fwd.dst = p->key.dst;
	s->fwd.dport = p->key.dport;
	pw_resolve(&s->fwd.dst, &s->dst);
	if (p->from.kind == PW_PLACE_WIRE) {
		p->service = pw_service_find(&p->key.dst, p->key.dport, p->key.proto, 1) ||
			     pw_service_lookup(&p->key.dst, 0, 0);
		/* from_netdev leaves it to the kernel. */
		if (!p->service && !s->dst.ifindex)
			return 0;
	}
	err = pw_check_source(p, &s->src);
	if (err)
		return err;
	if (pw_addr_is_multicast(&p->key.dst))
		return PW_DROP_MULTICAST;
	err = pw_ask_service(a, p, &s->fwd);
	if (err)
		return err;
	pw_resolve(&s->fwd.dst, &s->dst);
	err = pw_is_tunnelled(p, s->fwd.dport, &s->dst);
	if (err)
		return err;
	err = pw_place(skb, &p->from, &p->key.src, &s->dst, &s->fwd);
	a->to = s->fwd.to;
	if (err)
		return err;
	/* Both halves, though the first denial is what counts. */
	if (!pw_addr_eq(&p->key.src, &s->fwd.dst)) {
		if (p->from.kind == PW_PLACE_POD)
			pw_ask_half(&a->egress, s->src.policy_out, s->dst.identity, p->key.proto,
				    s->fwd.dport);
		if (s->fwd.to.kind == PW_PLACE_POD && p->from.kind != PW_PLACE_HOST)
			pw_ask_half(&a->ingress, s->dst.policy_in, s->src.identity, p->key.proto,
				    s->fwd.dport);
	}
	return pw_judge(&p->from, &p->key.src, p->key.proto, &s->src, &s->dst, &s->fwd);
}

SEC("tc")
int ask(struct __sk_buff *skb)
{
	struct pw_scratch *s = pw_get_scratch_of(PW_SCRATCH_ASK);
	struct pw_ask a = {};
	struct pw_pkt p = {};

	if (!s || bpf_skb_load_bytes(skb, ETH_HLEN, &a.key, offsetof(struct pw_ask, device)))
		return -1;
	p.key = a.key;
	a.reason = pw_ask_decide(skb, &a, &p, s);
	a.dst = s->fwd.dst;
	a.dport = s->fwd.dport;
	return bpf_skb_store_bytes(skb, ETH_HLEN, &a, sizeof(a), 0);
}
