/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * IPv4 in IPv4 (RFC 2003), put on and taken off by the programs alone: there
 * is no device for it. What carries more than a pod's packet (the mark of an
 * entry node), IPv6, ICMP errors and what the kernel cannot nest go by VXLAN.
 */
#ifndef PW_IPIP_H
#define PW_IPIP_H

#include "maps.h"
#include "parse.h"

#define PW_IPIP_LEN 20
#define PW_IP_DF 0x4000
#define PW_ECN_CE 3
#define PW_ECN_ECT0 2

/* Does the packet fit? A node's MTU is what VXLAN leaves. */
static __always_inline int pw_fits_ipip(const struct __sk_buff *skb, const struct pw_pkt *p,
					const struct pw_node *node)
{
	__u32 size = pw_size(skb, p);

	return node->flags & PW_NODE_HEADER && size <= node->mtu + (PW_ENCAP_LEN - PW_IPIP_LEN) &&
	       skb->len + PW_IPIP_LEN < 0xffff;
}

/*
 * Puts an IPv4 header before the packet: that of the node's VXLAN header, but
 * for the protocol. Never to be fragmented on the way: nobody would put the
 * pieces together. So it needs no identification (RFC 6864). Returns 0 when
 * done; else nothing has changed.
 */
static __always_inline int pw_encap_ipip(struct __sk_buff *skb, const struct pw_pkt *p,
					 const struct pw_node *node)
{
	const __u64 *from = (const void *)node->header;
	void *data, *end;
	struct iphdr *ip;
	__u64 *to, sum;
	__be16 frag;
	int i;

	if (bpf_skb_adjust_room(skb, PW_IPIP_LEN, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4))
		return -1;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + PW_HDR_UDP > end)
		return -1;
	to = data;
#pragma unroll
	for (i = 0; i < PW_HDR_UDP / 8; i++)
		to[i] = from[i];
	*(__u16 *)&to[i] = *(const __u16 *)&from[i];

	ip = data + PW_HDR_IP;
	ip->tos = p->ecn;
	ip->tot_len = bpf_htons(skb->len - ETH_HLEN);
	frag = ip->frag_off;
	ip->frag_off = bpf_htons(PW_IP_DF);
	ip->protocol = IPPROTO_IPIP;
	sum = (__u64)node->header_sum + bpf_htons(p->ecn) + ip->tot_len + (__u16)~frag +
	      ip->frag_off + (__u16)~bpf_htons(IPPROTO_UDP) + bpf_htons(IPPROTO_IPIP);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	ip->check = ~sum;
	return 0;
}

/* Takes it off again. No checksum but the inner packet's was ever verified. */
static __always_inline int pw_strip_ipip(struct __sk_buff *skb, struct pw_pkt *p)
{
	if (bpf_skb_adjust_room(skb, -PW_IPIP_LEN, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET))
		return PW_DROP_HELPER;
	p->stripped = 1;
	p->l3 -= PW_IPIP_LEN;
	p->l4 -= PW_IPIP_LEN;
	return 0;
}

/*
 * What the way has marked outside goes on inside (RFC 6040 4.2). Returns 0 or
 * the reason why a packet that cannot say so must not go on.
 */
static __always_inline int pw_take_ecn(struct __sk_buff *skb, struct pw_pkt *p, __u8 outer)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	__u32 sum;

	if (!outer || outer == PW_ECN_ECT0 || outer == p->ecn || p->ecn == PW_ECN_CE)
		return 0;
	if (!p->ecn)
		return outer == PW_ECN_CE ? PW_DROP_CONGESTED : 0;
	if ((void *)(ip + 1) > end)
		return PW_DROP_HELPER;
	sum = (__u16)~ip->check + (__u16)~bpf_htons(p->ecn) + bpf_htons(outer);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	ip->check = ~sum;
	ip->tos = (ip->tos & ~3) | outer;
	p->ecn = outer;
	return 0;
}

#endif
