// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc ingress of podweir.vxlan: what other nodes send through the tunnel, and
 * pods' answers from services that the host called.
 */
#include "follow.h"

SEC("tc")
int from_overlay(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_OVERLAY };
	int err, peer;

	/* A pod's answer to the host, see pw_to_host. */
	if (pw_take_mark(skb)) {
		pw_make_ours(skb);
		return PW_NEXT;
	}
	err = pw_parse(skb, &p);
	peer = pw_tunnel_source(skb, &p.from);
	if (peer)
		return pw_drop(skb, &p, peer);
	if (err && err != PW_DROP_FRAGMENT)
		return pw_drop(skb, &p, err);
	if (pw_has_via(skb, 0))
		p.key.via = p.from.id;
	if (err)
		return pw_go_fragment(skb, &p);
	/* Nobody's neighbour lives behind the tunnel. */
	if (p.kind == PW_KIND_LINK)
		return pw_drop(skb, &p, PW_DROP_MULTICAST);
	return pw_follow(skb, &p);
}
