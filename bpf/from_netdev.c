// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc ingress of the node's devices. Most of what arrives is the host's own
 * and is left alone. What is meant for a pod or a service, and the answers to what
 * left under this node's address, are decided here: the host's FORWARD chain
 * must have no say in it. VXLAN for pods is taken apart here; the rest of it
 * is left to the kernel's device, behind which from_overlay decides.
 */
#include "decap.h"
#include "follow.h"

/* Is it IPv4 in IPv4, or a fragment of it, for where the tunnels end here? */
static __always_inline int pw_ends_ipip(const struct pw_pkt *p)
{
	return p->key.proto == IPPROTO_IPIP && !p->v6 && pw_is_tunnel_end(&p->key.dst);
}

SEC("tc")
int from_netdev(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };
	int err, act;
	__u8 v6;

	/* A bridge floods frames for others past us. */
	if (skb->pkt_type != PW_PACKET_HOST)
		return PW_NEXT;
	err = pw_parse(skb, &p);
	p.from.kind = PW_PLACE_WIRE;
	p.from.id = skb->ifindex;
	if (!err && p.kind == PW_KIND_LINK)
		return pw_pass(skb, &p);
	if (err == PW_DROP_FRAGMENT && !pw_ends_ipip(&p))
		return pw_go_fragment(skb, &p);
	if (!err && pw_is_vxlan(&p)) {
		v6 = p.v6;
		act = pw_decap(skb, &p);
		if (act != PW_INNER) {
			p.v6 = v6; /* the outer packet is the one that goes on */
			return act == PW_NEXT ? pw_pass(skb, &p) : act;
		}
	} else {
		if (pw_ends_ipip(&p)) {
			bpf_tail_call(skb, &pw_calls, PW_CALL_IPIP);
			return pw_drop(skb, &p, PW_DROP_HELPER);
		}
		/* Every map would take it for IPv4, and so may whatever comes after. */
		if (err == PW_DROP_V4_MAPPED)
			return pw_drop(skb, &p, err);
		if (!bpf_map_lookup_elem(&pw_endpoints, &p.key.dst) &&
		    (err || !pw_is_ours(skb, &p)))
			return pw_pass(skb, &p);
		if (err)
			return pw_drop(skb, &p, err);
	}
	return pw_follow(skb, &p);
}
