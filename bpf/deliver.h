/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Carries out what a flow's entry says, and counts it. */
#ifndef PW_DELIVER_H
#define PW_DELIVER_H

#include "ipip.h"
#include "metrics.h"
#include "nat.h"
#include "settings.h"
#include "tunnel.h"

/*
 * "Not ours": the next program, or the stack, goes on with the packet. -1 in
 * both worlds (TCX_NEXT, TC_ACT_UNSPEC), 2 is a drop in both.
 */
#define PW_NEXT (-1)
#define PW_SHOT 2

/* Has another of our hooks decided this packet? It says so once. */
static __always_inline int pw_take_mark(struct __sk_buff *skb)
{
	if (!(skb->mark & cfg_mark))
		return 0;
	skb->mark &= ~cfg_mark;
	return 1;
}

static __always_inline int pw_drop(struct __sk_buff *skb, const struct pw_pkt *p, __u32 reason)
{
	pw_count(reason, p->hook, p->v6, skb->len);
	return PW_SHOT;
}

static __always_inline int pw_pass(struct __sk_buff *skb, const struct pw_pkt *p)
{
	pw_count(PW_PASS, p->hook, p->v6, skb->len);
	return PW_NEXT;
}

/* Passed to the stack by the hook of a pod's veth, which the guard asks for. */
static __always_inline void pw_tell_judged(struct __sk_buff *skb, const struct pw_pkt *p)
{
	if (p->hook == PW_FROM_POD)
		skb->priority = PW_JUDGED;
}

static __always_inline int pw_is_ingress(const struct pw_pkt *p)
{
	return p->hook == PW_FROM_POD || p->hook == PW_FROM_NETDEV || p->hook == PW_FROM_OVERLAY;
}

/* via: f's packets are from outside the cluster and entered here; see PW_VIA_MAC. */
static __always_inline int pw_write_macs(struct __sk_buff *skb, const __u8 *dst,
					 const struct pw_flow *f, int via)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	static const __u8 src[6] = PW_SRC_MAC;
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > end)
		return PW_DROP_HELPER;
	__builtin_memcpy(eth->h_dest, dst, 6);
	__builtin_memcpy(eth->h_source, src, 6);
	if (via)
		pw_frame_enters(eth, f);
	return 0;
}

/* A frame flooded to us by MAC is not for the stack unless we say so. */
static __always_inline void pw_make_ours(struct __sk_buff *skb)
{
	if (skb->pkt_type != PW_PACKET_HOST)
		bpf_skb_change_type(skb, PW_PACKET_HOST);
}

static __always_inline int pw_to_pod(struct __sk_buff *skb, struct pw_pkt *p,
				     const struct pw_flow *f)
{
	__u32 ifindex = f->to.id;

	if (p->hook == PW_TO_POD) {
		/* The stack's route must agree with ours. */
		if (ifindex != skb->ifindex)
			return pw_drop(skb, p, PW_DROP_NO_ROUTE);
		pw_count(PW_FWD_LOCAL, p->hook, p->v6, skb->len);
		return PW_NEXT;
	}
	if (pw_write_macs(skb, f->mac, f, 0))
		return pw_drop(skb, p, PW_DROP_HELPER);
	pw_count(p->stripped ? PW_FWD_DECAP : PW_FWD_LOCAL, p->hook, p->v6, skb->len);
	if (pw_is_ingress(p) && !(f->to.flags & PW_PLACE_QDISC)) {
		pw_make_ours(skb);
		return bpf_redirect_peer(ifindex, 0);
	}
	/* Out of the veth like the stack: what shapes or watches it has its say. */
	skb->mark |= cfg_mark;
	return bpf_redirect(ifindex, 0);
}

/* The node that f's packets go to; NULL if to none, or to one not known. */
static __always_inline struct pw_node *pw_node_of(const struct pw_flow *f)
{
	__u32 id = f->to.id;

	return f->to.kind == PW_PLACE_NODE ? bpf_map_lookup_elem(&pw_nodes, &id) : NULL;
}

/* Marked, because to_netdev comes after it. */
static __always_inline int pw_send(struct __sk_buff *skb, __u32 ifindex,
				   const struct pw_addr *nexthop)
{
	struct bpf_redir_neigh nh = {};
	int i;

	if (pw_addr_is_v4(nexthop)) {
		nh.nh_family = PW_AF_INET;
		nh.ipv4_nh = pw_addr_word(nexthop, 3);
	} else {
		nh.nh_family = PW_AF_INET6;
		for (i = 0; i < 4; i++)
			nh.ipv6_nh[i] = pw_addr_word(nexthop, i);
	}
	skb->mark |= cfg_mark;
	return bpf_redirect_neigh(ifindex, &nh, sizeof(nh), 0);
}

/*
 * Packets of a flow, the first included, get the tunnel header here. The
 * device takes ICMP errors, what does not fit, and what adjust_room refuses.
 */
static __always_inline int pw_to_node(struct __sk_buff *skb, struct pw_pkt *p,
				      const struct pw_flow *f, const struct pw_node *node)
{
	int tunnel = f->flags & PW_F_TUNNEL, via = tunnel && !(f->flags & PW_F_REPLY);
	int ours = p->kind != PW_KIND_ICMP_ERROR &&
		   (p->hook == PW_FROM_POD || p->hook == PW_FROM_NETDEV);

	if (!node || !cfg_overlay_ifindex)
		return pw_drop(skb, p, PW_DROP_NO_NODE);
	if (node->flags & (PW_NODE_DIRECT | PW_NODE_IPIP) && !tunnel && p->hook != PW_TO_OVERLAY) {
		if (node->flags & PW_NODE_DIRECT) {
			pw_count(PW_FWD_DIRECT, p->hook, p->v6, skb->len);
			return pw_send(skb, node->ifindex,
				       p->v6 ? &node->nexthop6 : &node->nexthop);
		}
		if (ours && pw_is_ipip(node, p) && pw_fits_ipip(skb, p, node) &&
		    !pw_encap_ipip(skb, p, node)) {
			pw_count(PW_FWD_IPIP, p->hook, p->v6, skb->len);
			return pw_send(skb, node->ifindex, &node->nexthop);
		}
	}
	if (ours && pw_fits(skb, p, node) && !pw_encap(skb, p, node, f, via)) {
		pw_count(PW_FWD_ENCAP, p->hook, p->v6, skb->len);
		return pw_send(skb, node->ifindex, &node->nexthop);
	}
	if (pw_write_macs(skb, node->mac, f, via))
		return pw_drop(skb, p, PW_DROP_HELPER);
	if (pw_set_tunnel(skb, node))
		return pw_drop(skb, p, PW_DROP_NO_NODE);
	pw_count(PW_FWD_TUNNEL, p->hook, p->v6, skb->len);
	if (p->hook == PW_TO_OVERLAY)
		return PW_NEXT;
	skb->mark |= cfg_mark;
	return bpf_redirect(cfg_overlay_ifindex, 0);
}

static __always_inline int pw_to_wire(struct __sk_buff *skb, struct pw_pkt *p,
				      const struct pw_flow *f)
{
	__u32 here = skb->ifindex;

	/* The verifier wants the context read by itself, not through a pointer. */
	asm volatile("" : "+r"(here));
	pw_count(PW_FWD_WIRE, p->hook, p->v6, skb->len);
	/* The stack chose the same way, and has its neighbour's address. */
	if (p->hook == PW_TO_NETDEV && f->to.id == here && pw_addr_eq(&p->key.dst, &f->dst))
		return PW_NEXT;
	return pw_send(skb, f->to.id, &f->nexthop);
}

/*
 * Up to the stack. The kernel's reverse-path filter wants a source's route to
 * lead back by the device that it came in by, and none of its own addresses
 * for a source. A service's address is not there, and may be one of the
 * node's: such answers, and what the host sends to itself through a service,
 * enter by the tunnel's device, which the service range is routed to. So does
 * what a node sent without the device's header, as it would with it.
 */
static __always_inline int pw_to_host(struct __sk_buff *skb, struct pw_pkt *p,
				      const struct pw_flow *f)
{
	int answer = p->hook != PW_FROM_OVERLAY && f->flags & PW_F_REPLY;
	int node = p->hook == PW_FROM_NETDEV &&
		   (p->from.kind == PW_PLACE_NODE || f->from.kind == PW_PLACE_NODE);

	/* What the host sends itself stays where it is. */
	if (p->hook == PW_TO_LO) {
		pw_count(PW_FWD_HOST, p->hook, p->v6, skb->len);
		return PW_NEXT;
	}
	/* Another port alone leaves the source, and its route, as they are. */
	if (!node && (!f->service || (pw_is_ingress(p) && !answer))) {
		if (!pw_is_ingress(p))
			return pw_drop(skb, p, PW_DROP_NO_ROUTE);
		pw_count(PW_FWD_HOST, p->hook, p->v6, skb->len);
		pw_tell_judged(skb, p);
		pw_make_ours(skb);
		return PW_NEXT;
	}
	pw_count(PW_FWD_HOST, p->hook, p->v6, skb->len);
	skb->mark |= cfg_mark;
	return bpf_redirect(cfg_overlay_ifindex, BPF_F_INGRESS);
}

/*
 * Does its time end here, where we take the place of routing? The stack takes
 * the TTL of what it forwards itself.
 */
static __always_inline int pw_expires(const struct pw_pkt *p, const struct pw_flow *f)
{
	return pw_is_ingress(p) && f->to.kind != PW_PLACE_HOST && p->ttl <= 1;
}

/*
 * pw_tell_ttl comes before it where somebody is to be told. node: that of
 * pw_node_of, which has been asked for its MTU. later: see pw_rewrite.
 */
static __always_inline int pw_act_on(struct __sk_buff *skb, struct pw_pkt *p,
				     const struct pw_flow *f, const struct pw_node *node, int later)
{
	int dec = pw_is_ingress(p) && f->to.kind != PW_PLACE_HOST;
	int err;

	if (pw_expires(p, f))
		return pw_drop(skb, p, PW_DROP_TTL);
	if (dec || f->flags & PW_F_XLATE) {
		err = pw_rewrite(skb, p, f, dec, later);
		if (err)
			return pw_drop(skb, p, err);
	}
	switch (f->to.kind) {
	case PW_PLACE_POD:
		return pw_to_pod(skb, p, f);
	case PW_PLACE_NODE:
		return pw_to_node(skb, p, f, node);
	case PW_PLACE_WIRE:
		return pw_to_wire(skb, p, f);
	case PW_PLACE_HOST:
		return pw_to_host(skb, p, f);
	}
	return pw_drop(skb, p, PW_DROP_NO_ROUTE);
}

static __always_inline int pw_act(struct __sk_buff *skb, struct pw_pkt *p, const struct pw_flow *f,
				  const struct pw_node *node)
{
	return pw_act_on(skb, p, f, node, 0);
}

#endif
