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
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *f;
	int err, peer, frame, named;

	/* A pod's answer to the host, see pw_to_host. */
	if (pw_take_mark(skb)) {
		pw_make_ours(skb);
		return PW_NEXT;
	}
	if (!s)
		return pw_drop(skb, &p, PW_DROP_HELPER);
	err = pw_parse(skb, &p);
	peer = pw_tunnel_source(skb, &p.from);
	if (peer)
		return pw_drop(skb, &p, peer);
	if (err && err != PW_DROP_FRAGMENT)
		return pw_drop(skb, &p, err);
	frame = pw_frame_kind(skb, 0);
	if (frame == PW_FRAME_VIA)
		p.key.via = p.from.id;
	/* Nobody's neighbour lives behind the tunnel. */
	if (p.kind == PW_KIND_LINK)
		return pw_drop(skb, &p, PW_DROP_MULTICAST);
	if (frame == PW_FRAME_POD || frame == PW_FRAME_HOST) {
		named = pw_read_name(skb, &p, s, frame);
		if (named)
			return pw_drop(skb, &p, named);
		p.service = PW_CALL_NAMED;
	}
	/* Each fragment's frame has the name, which is in the scratch. */
	if (err)
		return pw_go_fragment(skb, &p);
	if (p.service == PW_CALL_NAMED) {
		f = pw_flow_find(&p.key);
		if (!f || !pw_is_named(s, f))
			return pw_go_slow(skb, &p, s);
	}
	return pw_follow(skb, &p);
}
