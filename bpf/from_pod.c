// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* tc ingress of the host-side veth: everything a pod sends. */
#include "follow.h"

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_POD };
	int err = pw_parse(skb, &p);

	p.from.kind = PW_PLACE_POD;
	p.from.id = skb->ifindex;
	if (err == PW_DROP_FRAGMENT)
		return pw_go_fragment(skb, &p);
	if (err)
		return pw_drop(skb, &p, err);
	/* The link's own traffic: the host side answers or ignores it. */
	if (p.kind == PW_KIND_LINK) {
		pw_tell_judged(skb, &p);
		return pw_pass(skb, &p);
	}
	return pw_follow(skb, &p);
}
