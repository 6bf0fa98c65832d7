/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* VXLAN (RFC 7348) through the collect-metadata device. */
#ifndef PW_TUNNEL_H
#define PW_TUNNEL_H

#include "dsr.h"
#include "ipip.h"
#include "maps.h"
#include "parse.h"
#include "settings.h"

#define PW_TUNNEL_TTL 64
#define PW_VXLAN_FLAGS 0x08000000 /* a valid VNI and nothing else, RFC 7348 5 */

/*
 * Inner source addresses between nodes; the last byte is enum pw_frame. The
 * second says that the packet's source is outside the cluster and entered at
 * the sending node: the flow's key then carries that node (via), because one
 * client port towards two entry nodes and one backend are two flows. Others
 * name a backend, see dsr.h.
 */
#define PW_SRC_MAC { 0x02, 'p', 'w', 0, 0, PW_FRAME_PLAIN }
#define PW_VIA_MAC { 0x02, 'p', 'w', 0, 0, PW_FRAME_VIA }
#define PW_PACKET_HOST 0
#define PW_PACKET_OTHERHOST 3

/* Outer source ports, from the flow: the dynamic range (RFC 6335). */
static __always_inline __u16 pw_outer_sport(__u32 hash)
{
	return 0xc000 | ((hash ^ (hash >> 16)) & 0x3fff);
}

/* Does the packet go there in IPv4, unless its flow needs the tunnel? */
static __always_inline int pw_is_ipip(const struct pw_node *node, const struct pw_pkt *p)
{
	return node->flags & PW_NODE_IPIP && !p->v6 && p->kind == PW_KIND_FLOW;
}

/* What surely fits the way to a node, by the tunnel or not. */
static __always_inline __u32 pw_node_room(const struct pw_node *node, const struct pw_pkt *p)
{
	if (node->flags & PW_NODE_DIRECT)
		return node->mtu + PW_ENCAP_LEN;
	return node->mtu + (pw_is_ipip(node, p) ? PW_ENCAP_LEN - PW_IPIP_LEN : 0);
}

/*
 * Does the packet (every segment of it) fit the way to the node under our
 * own header? What does not is left to the device, which fragments.
 */
static __always_inline int pw_fits(const struct __sk_buff *skb, const struct pw_pkt *p,
				   const struct pw_node *node)
{
	__u32 size = pw_size(skb, p);

	/* The outer lengths are 16 bits wide, segmented or not. */
	return node->flags & PW_NODE_HEADER && size <= node->mtu &&
	       skb->len + PW_ENCAP_LEN < 0xffff;
}

/*
 * Puts the node's header before the packet. The kernel refuses what is
 * encapsulated already, and GSO kinds it cannot nest: then nothing has
 * changed and the device takes the packet. Returns 0 when done.
 */
static __always_inline int pw_encap(struct __sk_buff *skb, const struct pw_pkt *p,
				    const struct pw_node *node, const struct pw_flow *f, int via)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 |
		      BPF_F_ADJ_ROOM_ENCAP_L4_UDP | BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN) |
		      BPF_F_ADJ_ROOM_ENCAP_L2_ETH;
	void *data, *end;
	__u64 *to, sum;
	__u16 len;
	int i;

	if (bpf_skb_adjust_room(skb, PW_ENCAP_LEN, BPF_ADJ_ROOM_MAC, flags))
		return -1;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + PW_HDR_LEN > end)
		return -1;
	to = data;
#pragma unroll
	for (i = 0; i < PW_HDR_LEN / 8; i++)
		to[i] = ((const __u64 *)node->header)[i];

	len = skb->len - ETH_HLEN;
	{
		struct iphdr *ip = data + PW_HDR_IP;
		struct udphdr *udp = data + PW_HDR_UDP;
		struct ethhdr *inner = data + PW_HDR_INNER;

		ip->tos = p->ecn;
		ip->tot_len = bpf_htons(len);
		ip->id = bpf_get_prandom_u32();
		sum = (__u64)node->header_sum + bpf_htons(p->ecn) + ip->tot_len + ip->id;
		sum = (sum & 0xffff) + (sum >> 16);
		sum = (sum & 0xffff) + (sum >> 16);
		ip->check = ~sum;
		udp->source = bpf_htons(pw_outer_sport(f->key_hash));
		udp->len = bpf_htons(len - sizeof(*ip));
		if (p->v6)
			inner->h_proto = bpf_htons(ETH_P_IPV6);
		if (via)
			pw_frame_enters(inner, f);
	}
	return 0;
}

/*
 * Is that where the tunnels of other nodes end here? The port alone says
 * nothing: a pod or a service may have one of that number. While the agent has
 * not told, no address is, and the device takes what is for it.
 */
static __always_inline int pw_is_tunnel_end(const struct pw_addr *addr)
{
	__u32 zero = 0;
	struct pw_node *self = bpf_map_lookup_elem(&pw_nodes, &zero);

	return self && pw_addr_eq(&self->addr, addr);
}

/*
 * The device sends the frame where this key says, from this node's own tunnel
 * address (index 0 of pw_nodes): left to itself, the kernel would take
 * whichever address the route prefers, and the peer know nobody by it.
 */
static __always_inline int pw_set_tunnel(struct __sk_buff *skb, const struct pw_node *node)
{
	struct bpf_tunnel_key key = {};
	__u64 flags = BPF_F_ZERO_CSUM_TX;
	struct pw_node *self;
	__u32 zero = 0;
	int i;

	self = bpf_map_lookup_elem(&pw_nodes, &zero);
	if (!self)
		return -1;
	key.tunnel_id = cfg_vni;
	key.tunnel_ttl = PW_TUNNEL_TTL;
	if (pw_addr_is_v4(&node->addr)) {
		/* Host order, unlike the IPv6 ones. */
		key.remote_ipv4 = bpf_ntohl(pw_addr_word(&node->addr, 3));
		if (!key.remote_ipv4)
			return -1;
		if (pw_addr_is_v4(&self->addr))
			key.local_ipv4 = bpf_ntohl(pw_addr_word(&self->addr, 3));
	} else {
		for (i = 0; i < 4; i++)
			key.remote_ipv6[i] = pw_addr_word(&node->addr, i);
		if (!(key.remote_ipv6[0] | key.remote_ipv6[1] | key.remote_ipv6[2] |
		      key.remote_ipv6[3]))
			return -1;
		for (i = 0; i < 4 && !pw_addr_is_v4(&self->addr); i++)
			key.local_ipv6[i] = pw_addr_word(&self->addr, i);
		flags |= BPF_F_TUNINFO_IPV6;
	}
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), flags);
}

/*
 * Which node sent this frame? Fills from and returns 0, or the reason why
 * nobody we know did.
 */
static __always_inline int pw_tunnel_source(struct __sk_buff *skb, struct pw_place *from)
{
	struct bpf_tunnel_key key = {};
	struct pw_addr outer;
	__u32 *id;

	if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0))
		pw_addr_v4(&outer, bpf_htonl(key.remote_ipv4));
	else if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
		pw_addr_copy(&outer, key.remote_ipv6);
	else
		return PW_DROP_UNKNOWN_PEER;
	if (key.tunnel_id != cfg_vni)
		return PW_DROP_WRONG_VNI;
	id = bpf_map_lookup_elem(&pw_node_ids, &outer);
	if (!id || !*id)
		return PW_DROP_UNKNOWN_PEER;
	from->kind = PW_PLACE_NODE;
	from->id = *id;
	return 0;
}

#endif
