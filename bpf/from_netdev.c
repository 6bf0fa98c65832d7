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

static __always_inline int pw_is_vxlan(const struct pw_pkt *p)
{
	return p->key.proto == IPPROTO_UDP && p->key.dport == cfg_vxlan_port &&
	       pw_is_tunnel_end(&p->key.dst);
}

/*
 * A service's address, or the answer to, or an error about, what left
 * translated; or a call of the host itself that must be told from one of
 * these.
 */
static __always_inline int pw_is_ours(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_flow *f;

	if (p->kind == PW_KIND_ICMP_ERROR) {
		/* A node may be the other end, or on the way. */
		p->service = pw_error_is_ours(skb, p);
		if (!p->service)
			pw_learn_mtu(skb, p);
		return p->service;
	}
	if (p->kind != PW_KIND_FLOW)
		return 0;
	f = pw_flow_find(&p->key);
	if (f && f->flags & PW_F_XLATE) {
		p->service = !(f->flags & PW_F_REPLY);
		return 1;
	}
	p->service = pw_service_find(&p->key.dst, p->key.dport, p->key.proto, 1) ||
		     pw_service_lookup(&p->key.dst, 0, 0) ||
		     pw_answers_taken(&p->key, p->tcp_flags, 1);
	return p->service;
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
	if (!err && pw_is_vxlan(&p)) {
		v6 = p.v6;
		act = pw_decap(skb, &p);
		if (act != PW_INNER) {
			p.v6 = v6; /* the outer packet is the one that goes on */
			return act == PW_NEXT ? pw_pass(skb, &p) : act;
		}
	} else {
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
