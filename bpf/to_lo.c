// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc egress of lo: what the host sends to its own addresses, where NodePorts
 * and addresses of services may be, and the answers of its own backends.
 */
#include "follow.h"

SEC("tc")
int to_lo(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_TO_LO };
	int err;

	if (pw_take_mark(skb) || skb->ingress_ifindex)
		return PW_NEXT;
	err = pw_parse_from_stack(skb, &p);
	/* Most of it by far, and never a service. */
	if (pw_addr_is_loopback(&p.key.dst) || pw_addr_is_loopback(&p.key.src))
		return pw_pass(skb, &p);
	if (err == PW_DROP_FRAGMENT)
		return pw_go_fragment(skb, &p);
	if (err)
		return pw_pass(skb, &p);
	if (!pw_host_follows(skb, &p))
		return pw_pass(skb, &p);
	return pw_follow(skb, &p);
}
