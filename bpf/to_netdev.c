// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc egress of the node's devices: what the host itself sends to a service
 * beyond the cluster's range, and the answers of backends on the host's
 * network, or its errors, to clients that came by a service. All else is left
 * alone.
 */
#include "follow.h"

SEC("tc")
int to_netdev(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_TO_NETDEV };
	int err;

	if (pw_take_mark(skb))
		return PW_NEXT;
	/* What the host forwards is not ours. */
	if (skb->ingress_ifindex)
		return PW_NEXT;
	err = pw_parse_from_stack(skb, &p);
	if (err == PW_DROP_FRAGMENT)
		return pw_go_fragment(skb, &p);
	if (err)
		return pw_pass(skb, &p);
	/* The tunnel's own packets. */
	if (p.key.proto == IPPROTO_UDP && p.key.dport == cfg_vxlan_port &&
	    pw_is_tunnel_end(&p.key.src) && bpf_map_lookup_elem(&pw_node_ids, &p.key.dst))
		return pw_pass(skb, &p);
	if (!pw_host_follows(skb, &p))
		return pw_pass(skb, &p);
	return pw_follow(skb, &p);
}
