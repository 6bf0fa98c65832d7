/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Pods whose veth has filters of others at its ingress, such as one that leads
 * what the pod sends through a device that shapes it (ifb), which puts it back
 * at that ingress, past all tc programs. From there it goes to the device that
 * the agent has put over the veth (a macvlan that takes every unicast frame):
 *
 *   veth: from_pod_judge -> filters -> (ifb ->) over it: from_pod_send
 *
 * from_pod_judge does all that from_pod does, up to the sending: what it lets
 * through it leaves to the filters as it came, and from_pod_send, which finds
 * the same flow, sends it. Should nothing be over the veth any more, nobody
 * takes it: it bears the type of a frame for another host, which macvlan makes
 * good and the stack drops.
 *
 * What is for the stack is translated at once. It stays on the veth, by a
 * destination MAC that macvlan does not take; the filters see it, too.
 */
#ifndef PW_FILTERED_H
#define PW_FILTERED_H

#include "deliver.h"

/* The bit of a MAC that says that the frame is for more than one. */
#define PW_MAC_GROUP 1

static __always_inline int pw_group_set(struct __sk_buff *skb, int group)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > end)
		return -1;
	if (group)
		eth->h_dest[0] |= PW_MAC_GROUP;
	else
		eth->h_dest[0] &= ~PW_MAC_GROUP;
	return 0;
}

/* For the stack: past what may be over the veth. The stack reads no MAC. */
static __always_inline void pw_stay(struct __sk_buff *skb, const struct pw_pkt *p)
{
	if (p->from.flags & PW_PLACE_COVERED)
		pw_group_set(skb, 1);
}

/* Is what f says with the packet left to be done until the filters had it? */
static __always_inline int pw_leaves(const struct pw_pkt *p, const struct pw_flow *f)
{
	return p->from.flags & PW_PLACE_FILTERED && f->to.kind != PW_PLACE_HOST;
}

/* Who takes it must be one: also of a frame that the pod has sent to all. */
static __always_inline void pw_to_filters(struct __sk_buff *skb)
{
	pw_group_set(skb, 0);
	bpf_skb_change_type(skb, PW_PACKET_OTHERHOST);
}

/*
 * The end of from_pod_judge for what is let through: 1 = left to the filters,
 * which is "not ours". 0 = f's action is to be carried out here.
 */
__noinline int pw_leave(struct __sk_buff *skb, struct pw_pkt *p, const struct pw_flow *f)
{
	if (!p || !f)
		return 0;
	if (f->to.kind == PW_PLACE_HOST)
		pw_stay(skb, p);
	if (!pw_leaves(p, f))
		return 0;
	pw_to_filters(skb);
	return 1;
}

#endif
