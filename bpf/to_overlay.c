// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc egress of podweir.vxlan. What a pod's hook sent here has its tunnel key
 * and the mark. The rest is the host's own: its routes lead the pods of other
 * nodes, and the service range, to this device.
 */
#include "follow.h"

SEC("tc")
int to_overlay(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_TO_OVERLAY };
	int err;

	if (pw_take_mark(skb))
		return PW_NEXT;
	err = pw_parse_from_stack(skb, &p);
	if (err && err != PW_DROP_FRAGMENT)
		return pw_drop(skb, &p, err);
	if (err)
		return pw_go_fragment(skb, &p);
	/* The device has no neighbours to ask for. */
	if (p.kind == PW_KIND_LINK)
		return pw_drop(skb, &p, PW_DROP_MULTICAST);
	return pw_follow(skb, &p);
}
