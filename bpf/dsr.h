/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Direct return: an entry node leaves a client's packet as it is, with the
 * service's address, and its frame in the tunnel names the backend. The
 * backend's node translates, and answers the client by its own route.
 *
 * The inner Ethernet addresses carry the name, for both ends are ours:
 *
 *	source       02 'p' 'w' PORT PORT KIND
 *	destination  02 'p' ADDR ADDR ADDR ADDR
 *
 * KIND is enum pw_frame. ADDR is an IPv4 address, or what an IPv6 address has
 * behind the first 96 bits of its node's pod range (PW_FRAME_POD) or of its
 * node's own address (PW_FRAME_HOST). Where it has others, the flow returns
 * by the entry node.
 */
#ifndef PW_DSR_H
#define PW_DSR_H

#include "maps.h"
#include "parse.h"
#include "scratch.h"

/* p->service of a packet whose backend the entry node has named. */
#define PW_CALL_NAMED 2

/* What a frame out of the tunnel says of its packet: enum pw_frame. */
static __always_inline int pw_frame_kind(struct __sk_buff *skb, __u32 base)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data + base;

	if ((void *)(eth + 1) > end || eth->h_source[0] != 0x02 || eth->h_source[1] != 'p' ||
	    eth->h_source[2] != 'w')
		return PW_FRAME_PLAIN;
	return eth->h_source[5];
}

/* Writes into a frame with plain addresses that its packet entered here. */
static __always_inline void pw_frame_enters(struct ethhdr *eth, const struct pw_flow *f)
{
	eth->h_source[5] = PW_FRAME_VIA;
	if (!f->frame)
		return;
	eth->h_dest[0] = 0x02;
	eth->h_dest[1] = 'p';
	__builtin_memcpy(eth->h_dest + 2, f->mac + 2, 4);
	eth->h_source[3] = f->mac[0];
	eth->h_source[4] = f->mac[1];
	eth->h_source[5] = f->frame;
}

/* Is the backend that a frame names the one of its flow, to a pod? */
static __always_inline int pw_frame_names(struct __sk_buff *skb, __u32 base,
					  const struct pw_flow *f)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data + base;
	__u32 low;

	if ((void *)(eth + 1) > end || !f->entry)
		return 0;
	__builtin_memcpy(&low, eth->h_dest + 2, 4);
	return low == pw_addr_word(&f->dst, 3) &&
	       ((eth->h_source[3] << 8) | eth->h_source[4]) == f->dport;
}

/* The port of the backend that an entry node's flow names; its address is f->nexthop. */
static __always_inline __u16 pw_named_port(const struct pw_flow *f)
{
	return (f->mac[0] << 8) | f->mac[1];
}

static __always_inline int pw_same_96(const struct pw_addr *a, const struct pw_addr *b)
{
	return pw_addr_word(a, 0) == pw_addr_word(b, 0) &&
	       pw_addr_word(a, 1) == pw_addr_word(b, 1) && pw_addr_word(a, 2) == pw_addr_word(b, 2);
}

/* How a frame to that node names the address: enum pw_frame, 0 = it cannot. */
static __always_inline int pw_nameable(const struct pw_target *dst, __u32 node)
{
	struct pw_node_v6 *base;

	if (pw_addr_is_v4(&dst->addr))
		return PW_FRAME_POD;
	base = bpf_map_lookup_elem(&pw_node_v6, &node);
	if (!base)
		return 0;
	if (dst->flags & PW_PEER_POD)
		return pw_same_96(&base->pods, &dst->addr) ? PW_FRAME_POD : 0;
	return dst->flags & PW_PEER_NODE && pw_same_96(&base->host, &dst->addr) ? PW_FRAME_HOST : 0;
}

/*
 * Turns the decision to translate to a backend on another node into one to
 * name it. The answers will not be seen here: that they are given, and their
 * end, is taken for granted from the start. So the client's next packet
 * confirms the flow, and its FIN closes it.
 */
static __always_inline void pw_name_backend(const struct pw_pkt *p, struct pw_scratch *s)
{
	int kind = pw_nameable(&s->dst, s->fwd.to.id);
	__u32 low = pw_addr_word(&s->dst.addr, 3);

	if (!kind)
		return;
	s->fwd.frame = kind;
	s->fwd.nexthop = s->dst.addr;
	s->fwd.mac[0] = s->fwd.dport >> 8;
	s->fwd.mac[1] = s->fwd.dport;
	__builtin_memcpy(s->fwd.mac + 2, &low, 4);
	s->fwd.dst = p->key.dst;
	s->fwd.dport = p->key.dport;
	/* What the client sends is limited by the SYN-ACK, at the other end. */
	s->fwd.flags &= ~(PW_F_XLATE | PW_F_CLAMP);
	if (p->key.proto != IPPROTO_TCP || p->tcp_flags & PW_TCP_SYN)
		s->fwd.flags |= PW_F_REPLIED;
	if (p->key.proto == IPPROTO_TCP)
		s->fwd.tcp = PW_TCP_FIN_REPLY;
}

/* Reads the name in a frame into the scratch: s->named. */
static __always_inline int pw_read_name(struct __sk_buff *skb, const struct pw_pkt *p,
					struct pw_scratch *s, int kind)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct pw_node_v6 *base;
	struct ethhdr *eth = data;
	__u32 low, self = 0;

	if ((void *)(eth + 1) > end)
		return PW_DROP_HELPER;
	__builtin_memcpy(&low, eth->h_dest + 2, 4);
	s->named_port = (eth->h_source[3] << 8) | eth->h_source[4];
	if (!p->v6) {
		pw_addr_v4(&s->named, low);
		return 0;
	}
	base = bpf_map_lookup_elem(&pw_node_v6, &self);
	if (!base)
		return PW_DROP_HELPER;
	s->named = kind == PW_FRAME_HOST ? base->host : base->pods;
	((__u32 *)s->named.b)[3] = low;
	return 0;
}

/* Is f the flow of a packet that names what is in the scratch? */
static __always_inline int pw_is_named(const struct pw_scratch *s, const struct pw_flow *f)
{
	return f->entry && pw_addr_eq(&f->dst, &s->named) && f->dport == s->named_port;
}

#endif
