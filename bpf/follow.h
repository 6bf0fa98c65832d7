/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What every hook does with a packet whose place of origin it knows: one
 * look-up and its action when the flow is established. All else is left to
 * slow.c.
 */
#ifndef PW_FOLLOW_H
#define PW_FOLLOW_H

#include "deliver.h"
#include "flow.h"
#include "icmp.h"
#include "service.h"

static __always_inline int pw_is_syn(const struct pw_pkt *p)
{
	return p->key.proto == IPPROTO_TCP &&
	       (p->tcp_flags & (PW_TCP_SYN | PW_TCP_ACK)) == PW_TCP_SYN;
}

/* All that lets an entry speak for a packet without a second thought. */
static __always_inline int pw_current(const struct pw_pkt *p, const struct pw_flow *f, __u64 now)
{
	return f->verdict == PW_VERDICT_ALLOW && pw_same_place(&f->from, &p->from) && pw_fresh(f) &&
	       (pw_promotes(p, f) || pw_flow_whole(&p->key, f)) &&
	       !(pw_is_syn(p) && (f->service || pw_tcp_closed(f->tcp))) &&
	       f->last_seen + pw_flow_timeout(p->key.proto, f) > now;
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
	       pw_service_lookup(&p->key.dst, 0, 0) || pw_answers_taken(&p->key, p->tcp_flags, 0);
}

static __always_inline int pw_is_vxlan(const struct pw_pkt *p)
{
	return p->key.proto == IPPROTO_UDP && p->key.dport == cfg_vxlan_port &&
	       pw_is_tunnel_end(&p->key.dst);
}

/*
 * From the wire: a service's address, or the answer to, or an error about,
 * what left translated; or a call of the host itself that must be told from
 * one of these.
 */
static __always_inline int pw_is_ours(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_flow *f;

	if (p->kind == PW_KIND_ICMP_ERROR) {
		/* A node may be the other end, or on the way. */
		p->service = pw_error_is_ours(skb, p);
		if (!p->service)
			pw_learn_mtu(skb, p);
		return p->service;
	}
	if (p->kind != PW_KIND_FLOW)
		return 0;
	f = pw_flow_find(&p->key);
	if (f && (f->flags & PW_F_XLATE || f->frame)) {
		p->service = !(f->flags & PW_F_REPLY);
		return 1;
	}
	/* To the host from a node that routes where our answers are tunnelled. */
	if (f && f->from.kind == PW_PLACE_NODE && pw_node_plain(f->from.id))
		return 1;
	p->service = pw_service_find(&p->key.dst, p->key.dport, p->key.proto, 1) ||
		     pw_service_lookup(&p->key.dst, 0, 0) ||
		     pw_answers_taken(&p->key, p->tcp_flags, 1);
	return p->service;
}

/* The MTU of the tunnel that f's packets come by or go by; 0 = not known. */
static __always_inline __u32 pw_tunnel_mtu(const struct pw_flow *f)
{
	__u32 id = f->entry ?: f->to.kind == PW_PLACE_NODE ? f->to.id : f->from.id;
	struct pw_node *node = bpf_map_lookup_elem(&pw_nodes, &id);

	return node ? node->mtu : 0;
}

/* What every way carries (RFC 8200 5), or is supposed to (RFC 791). */
#define PW_MTU_ANY_V6 1280
#define PW_MTU_ANY_V4 576

/*
 * Might it be too big for its way, and its sender want to know? What the host
 * sends, its stack has seen to. node: the one that it goes to.
 */
static __always_inline int pw_may_exceed(const struct __sk_buff *skb, const struct pw_pkt *p,
					 const struct pw_flow *f, const struct pw_node *node)
{
	if (node)
		return pw_size(skb, p) > pw_node_room(node, p) && pw_is_ingress(p);
	return f->to.kind == PW_PLACE_WIRE &&
	       skb->len > (p->v6 ? PW_MTU_ANY_V6 : PW_MTU_ANY_V4) + ETH_HLEN && pw_is_ingress(p);
}

/*
 * The MTU of f's way to a node; 0 = not known. Without a tunnel header there
 * is room for one more; a way of the other family is not measured, its device
 * is.
 */
static __always_inline __u32 pw_node_mtu(struct __sk_buff *skb, const struct pw_pkt *p,
					 const struct pw_flow *f)
{
	__u32 id = f->to.id, mtu = 0, v4;
	struct pw_node *node = bpf_map_lookup_elem(&pw_nodes, &id);

	if (!node)
		return 0;
	if (!(f->flags & PW_F_TUNNEL) && pw_is_ipip(node, p))
		return node->mtu ? pw_node_room(node, p) : 0;
	if (!(node->flags & PW_NODE_DIRECT) || f->flags & PW_F_TUNNEL) {
		/* IPv6 needs so much; the device cuts what is too big for the wire. */
		return node->mtu && p->v6 && node->mtu < PW_MTU_ANY_V6 ? PW_MTU_ANY_V6 : node->mtu;
	}
	v4 = pw_addr_is_v4(&node->addr);
	if (node->mtu && v4 != p->v6)
		return node->mtu + (v4 ? PW_ENCAP_LEN : PW_ENCAP6_LEN);
	bpf_check_mtu(skb, node->ifindex, &mtu, 0, 0);
	return mtu;
}

/* Are f's packets limited by the way that they go, or some of them? */
static __always_inline int pw_is_limited(const struct __sk_buff *skb, const struct pw_pkt *p,
					 const struct pw_flow *f, const struct pw_node *node)
{
	return f->flags & (PW_F_CLAMP | PW_F_TUNNEL) || pw_may_exceed(skb, p, f, node);
}

/* The MTU of the way that it does not fit, else 0. */
static __always_inline __u32 pw_exceeds(struct __sk_buff *skb, const struct pw_pkt *p,
					const struct pw_flow *f)
{
	__u32 size = pw_size(skb, p), mtu = 0;

	if (f->to.kind == PW_PLACE_NODE)
		mtu = pw_node_mtu(skb, p, f);
	else if (pw_may_exceed(skb, p, f, NULL))
		bpf_check_mtu(skb, f->to.id, &mtu, 0, 0); /* fills it in, whatever it says */
	return mtu && size > mtu ? mtu : 0;
}

/*
 * What enters the tunnel from outside, or leaves by it for there, was made
 * for a way that may be wider: segments are limited by the MSS, and what is
 * too big all the same is answered with the tunnel's MTU. So is what a pod
 * sends by a way that is narrower than its own device. Few packets of a known
 * flow are concerned: the slow path does it.
 */
__noinline int pw_over_limit(struct __sk_buff *skb, struct pw_pkt *p, const struct pw_flow *f)
{
	if (!p || !f)
		return 0;
	if (f->flags & PW_F_CLAMP && p->key.proto == IPPROTO_TCP && p->tcp_flags & PW_TCP_SYN)
		return 1;
	return pw_exceeds(skb, p, f) != 0;
}

/* The slow path, in slow.c; that of fragments, in fragment.c; and from_ipip.c. */
int slow(struct __sk_buff *skb);
int fragment(struct __sk_buff *skb);
int from_ipip(struct __sk_buff *skb);

enum pw_call {
	PW_CALL_SLOW = 0,
	PW_CALL_FRAGMENT = 1,
	PW_CALL_IPIP = 2,
	PW_CALLS = 3,
};

/*
 * A jump to a program instead of a copy of it in every hook: the verifier
 * would follow it through each of them. Every load has its own, so that a hook
 * never meets a slow path of another version.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, PW_CALLS);
	__type(key, __u32);
	__array(values, int(struct __sk_buff *));
} pw_calls SEC(".maps") = {
	.values = { [PW_CALL_SLOW] = &slow,
		    [PW_CALL_FRAGMENT] = &fragment,
		    [PW_CALL_IPIP] = &from_ipip },
};

/*
 * Leaves the packet to the slow path, which finds p in the scratch. Does not
 * return, unless the entry is missing, which the loader sees to.
 */
static __always_inline int pw_go_slow(struct __sk_buff *skb, struct pw_pkt *p, struct pw_scratch *s)
{
	s->pkt = *p;
	bpf_tail_call(skb, &pw_calls, PW_CALL_SLOW);
	return pw_drop(skb, p, PW_DROP_HELPER);
}

/* The same for what the parser calls PW_DROP_FRAGMENT, and what is risen. */
static __always_inline int pw_go_fragment(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();

	if (s) {
		s->pkt = *p;
		bpf_tail_call(skb, &pw_calls, PW_CALL_FRAGMENT);
	}
	return pw_drop(skb, p, PW_DROP_HELPER);
}

static __always_inline int pw_follow(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *at = NULL;
	struct pw_node *node;
	__u64 now = pw_now();

	if (!s)
		return pw_drop(skb, p, PW_DROP_HELPER);
	if (p->kind != PW_KIND_ICMP_ERROR && !p->missed) {
		if (pw_flow_load(&p->key, &s->known, &at) && pw_current(p, &s->known, now) &&
		    !pw_flow_touch(p, &s->known, at, skb->len, now)) {
			node = pw_node_of(&s->known);
			p->known = pw_expires(p, &s->known) ||
				   (pw_is_limited(skb, p, &s->known, node) &&
				    pw_over_limit(skb, p, &s->known));
			if (!p->known)
				return pw_act(skb, p, &s->known, node);
		}
		p->missed = !at;
	}
	return pw_go_slow(skb, p, s);
}

#endif
