/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * VXLAN for pods of this node loses its header at the device it arrives on,
 * without a second pass through the stack, the first packet of a flow like
 * the others. Whatever is unusual (an unknown peer, an outer IPv6 header,
 * fragments, options, a congestion mark, an old kernel) is left to the
 * kernel's device, and from_overlay decides.
 */
#ifndef PW_DECAP_H
#define PW_DECAP_H

#include "follow.h"
#include "ipip.h"

/* Written since 6.3; older kernels refuse the flag and the device decaps. */
#ifndef BPF_F_ADJ_ROOM_DECAP_L3_IPV6
#define BPF_F_ADJ_ROOM_DECAP_L3_IPV6 (1ULL << 8)
#endif

/* The outer header is one that this very node would send to us. */
static __always_inline int pw_outer_matches(struct __sk_buff *skb, const struct pw_node *node)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	const struct iphdr *template = (const void *)(node->header + PW_HDR_IP);
	const __be32 *vxlan = data + PW_HDR_VXLAN;
	struct iphdr *ip = data + PW_HDR_IP;

	if (data + PW_HDR_INNER > end || !(node->flags & PW_NODE_HEADER))
		return 0;
	return ip->saddr == template->daddr && ip->daddr == template->saddr &&
	       vxlan[0] == bpf_htonl(PW_VXLAN_FLAGS) && vxlan[1] == bpf_htonl(cfg_vni << 8);
}

static __always_inline int pw_strip(struct __sk_buff *skb, struct pw_pkt *p)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET;
	void *data, *end;
	struct ethhdr *eth;

	if (p->v6)
		flags |= BPF_F_ADJ_ROOM_DECAP_L3_IPV6;
	if (bpf_skb_adjust_room(skb, -PW_ENCAP_LEN, BPF_ADJ_ROOM_MAC, flags))
		return -1;
	/* One checksum fewer has been verified; nothing to take if none was. */
	bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	p->stripped = 1;
	p->l3 -= PW_ENCAP_LEN;
	p->l4 -= PW_ENCAP_LEN;
	if (p->v6) {
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
		eth = data;
		if ((void *)(eth + 1) > end)
			return 0;
		eth->h_proto = bpf_htons(ETH_P_IPV6);
	}
	return 0;
}

/*
 * The node that a header says it is from: one that we know, and would expect
 * this header of. NULL if there is none.
 */
static __always_inline struct pw_node *pw_outer_node(struct __sk_buff *skb, struct pw_place *from)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + PW_HDR_IP;
	struct pw_node *node;
	struct pw_addr outer;
	__u32 *id;

	if ((void *)(ip + 1) > end)
		return NULL;
	pw_addr_v4(&outer, ip->saddr);
	id = bpf_map_lookup_elem(&pw_node_ids, &outer);
	if (!id || !*id)
		return NULL;
	from->kind = PW_PLACE_NODE;
	from->id = *id;
	node = bpf_map_lookup_elem(&pw_nodes, &from->id);
	return node && pw_outer_matches(skb, node) ? node : NULL;
}

/* What is no action: p has lost its header and goes the way of all packets. */
#define PW_INNER 256

/*
 * Returns the action, PW_NEXT to let the device take the packet, or PW_INNER.
 * p is the outer packet's and becomes the inner one's: one of them is all
 * that the stack has room for.
 */
static __always_inline int pw_decap(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *at = NULL, *f;
	struct pw_node *node;
	__u64 now = pw_now();
	int known, frame;
	__u32 id;

	if (!s)
		return PW_NEXT;
	f = &s->known;
	if (p->v6 || p->l4 != PW_HDR_UDP || p->ecn == PW_ECN_CE)
		return PW_NEXT;
	__builtin_memset(p, 0, sizeof(*p));
	p->hook = PW_FROM_NETDEV;
	if (pw_parse_at(skb, p, PW_HDR_INNER) || p->kind != PW_KIND_FLOW || p->ttl <= 1)
		return PW_NEXT;
	/*
	 * The kernel would still take the packet for a tunnelled one when it
	 * cuts it into datagrams, and lose them all. TCP does not care.
	 */
	if (skb->gso_size && p->key.proto != IPPROTO_TCP)
		return PW_NEXT;
	/*
	 * The entry node's id would have to be looked up for the key, and a
	 * backend on the host's network needs the device.
	 */
	frame = pw_frame_kind(skb, PW_HDR_INNER);
	if (frame != PW_FRAME_PLAIN && frame != PW_FRAME_POD)
		return PW_NEXT;
	known = pw_flow_load(&p->key, f, &at);
	/* Its own backend, or none yet. */
	if (frame != PW_FRAME_PLAIN && !(known && pw_frame_names(skb, PW_HDR_INNER, f)))
		return PW_NEXT;
	/* The host's own needs the device. */
	if (known && f->to.kind != PW_PLACE_POD)
		return PW_NEXT;
	if (known && f->from.kind == PW_PLACE_NODE) {
		p->from = f->from;
		id = f->from.id;
		node = bpf_map_lookup_elem(&pw_nodes, &id);
		if (node && pw_outer_matches(skb, node) && pw_current(p, f, now)) {
			if (pw_strip(skb, p))
				return PW_NEXT;
			/* Stripped as it is, it goes the way of all packets. */
			return pw_flow_touch(p, f, at, skb->len, now) ? PW_INNER
								      : pw_act(skb, p, f, NULL);
		}
	}
	/* Unknown, or not as its entry says: to a pod from a node it is, at least. */
	if (!bpf_map_lookup_elem(&pw_endpoints, &p->key.dst) || !pw_outer_node(skb, &p->from) ||
	    pw_strip(skb, p))
		return PW_NEXT;
	p->missed = !at;
	return PW_INNER;
}

#endif
