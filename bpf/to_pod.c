// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc egress of the host-side veth: what the host's stack delivers to a pod.
 * Packets that another hook has decided carry the mark, and those handed
 * over with redirect_peer do not come by here.
 */
#include "follow.h"

SEC("tc")
int to_pod(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_TO_POD };
	int err;

	if (pw_take_mark(skb))
		return PW_NEXT;
	err = pw_parse_from_stack(skb, &p);
	if (err && err != PW_DROP_FRAGMENT)
		return pw_drop(skb, &p, err);
	if (err)
		return pw_go_fragment(skb, &p);
	if (p.kind == PW_KIND_LINK)
		return pw_pass(skb, &p);
	return pw_follow(skb, &p);
}
