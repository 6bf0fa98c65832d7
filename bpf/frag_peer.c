// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The far end of podweir.frag, in the network namespace where the kernel
 * reassembles. Frames are lost on that way, but marks are not: that of the
 * first fragment is the datagram's, and that of all that is made of it.
 */
#include "frag.h"

/* tc ingress: from the frame into the mark. */
SEC("tc")
int frag_enter(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data;
	__u32 token;

	if ((void *)(eth + 1) > end || skb->pkt_type != PW_PACKET_HOST)
		return PW_SHOT;
	__builtin_memcpy(&token, eth->h_source + PW_TOKEN_AT, 4);
	skb->mark = token;
	return PW_NEXT;
}

/* tc egress: and back. What the kernel says here itself is nobody's. */
SEC("tc")
int frag_leave(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data;
	__u32 token = skb->mark;

	if (!token || (void *)(eth + 1) > end)
		return PW_SHOT;
	__builtin_memcpy(eth->h_source + PW_TOKEN_AT, &token, 4);
	return PW_NEXT;
}
