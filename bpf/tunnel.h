/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* VXLAN (RFC 7348) through the collect-metadata device. */
#ifndef PW_TUNNEL_H
#define PW_TUNNEL_H

#include "maps.h"
#include "parse.h"
#include "settings.h"

#define PW_TUNNEL_TTL 64
#define PW_PACKET_HOST 0

/* The device sends the frame where this key says. */
static __always_inline int pw_set_tunnel(struct __sk_buff *skb, const struct pw_node *node)
{
	struct bpf_tunnel_key key = {};
	__u64 flags = BPF_F_ZERO_CSUM_TX;
	int i;

	key.tunnel_id = cfg_vni;
	key.tunnel_ttl = PW_TUNNEL_TTL;
	if (pw_addr_is_v4(&node->addr)) {
		/* Host order, unlike the IPv6 one. */
		key.remote_ipv4 = bpf_ntohl(pw_addr_word(&node->addr, 3));
		if (!key.remote_ipv4)
			return -1;
	} else {
		for (i = 0; i < 4; i++)
			key.remote_ipv6[i] = pw_addr_word(&node->addr, i);
		if (!(key.remote_ipv6[0] | key.remote_ipv6[1] | key.remote_ipv6[2] |
		      key.remote_ipv6[3]))
			return -1;
		flags |= BPF_F_TUNINFO_IPV6;
	}
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), flags);
}

/*
 * Which node sent this frame? Fills from and returns 0, or the reason why
 * nobody we know did.
 */
static __always_inline int pw_tunnel_source(struct __sk_buff *skb, struct pw_place *from)
{
	struct bpf_tunnel_key key = {};
	struct pw_addr outer;
	__u32 *id;

	if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0))
		pw_addr_v4(&outer, bpf_htonl(key.remote_ipv4));
	else if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
		pw_addr_copy(&outer, key.remote_ipv6);
	else
		return PW_DROP_UNKNOWN_PEER;
	if (key.tunnel_id != cfg_vni)
		return PW_DROP_WRONG_VNI;
	id = bpf_map_lookup_elem(&pw_node_ids, &outer);
	if (!id || !*id)
		return PW_DROP_UNKNOWN_PEER;
	from->kind = PW_PLACE_NODE;
	from->id = *id;
	return 0;
}

#endif
