/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What an address is: a pod of this node, a pod behind another node, a
 * node, the world; its identity, and the generation that guards the answer.
 */
#ifndef PW_RESOLVE_H
#define PW_RESOLVE_H

#include "maps.h"
#include "parse.h"

/* The answer, copied out of the maps. Lives in the scratch. */
struct pw_target {
	struct pw_addr addr; /* what was asked for; see pw_key_arg */
	struct pw_gen_ref gen;
	__u32 identity;
	__u32 node;
	__u32 flags;     /* enum pw_peer_flags */
	__u32 ifindex;   /* of a local pod's host-side veth, else 0 */
	__u32 policy_in;
	__u32 policy_out;
	__u8 mac[6];
	__u8 place_flags; /* of a local pod: enum pw_place_flags */
	__u8 pad;
};

/* Are pods masqueraded towards addresses of this family? See PW_PEER_PLAIN. */
static __always_inline int pw_masquerade_to(const struct pw_addr *dst)
{
	return cfg_masquerade & (pw_addr_is_v4(dst) ? PW_IPV4 : PW_IPV6);
}

static __always_inline __u32 pw_gen(__u32 slot)
{
	__u32 *gen = bpf_map_lookup_elem(&pw_gens, &slot);

	return gen ? *(volatile __u32 *)gen : 0;
}

/* Has nothing moved since? */
static __always_inline int pw_gen_fresh(const struct pw_gen_ref *ref)
{
	return pw_gen(ref->slot) == ref->gen;
}

static __always_inline int pw_fresh(const struct pw_flow *f)
{
	return pw_gen_fresh(&f->src_gen) && pw_gen_fresh(&f->dst_gen);
}

static __always_inline int pw_node_is(__u32 id, __u32 flags)
{
	struct pw_node *node = bpf_map_lookup_elem(&pw_nodes, &id);

	return node && node->flags & flags;
}

/* Are packets to this node's pods routed as they are, without a tunnel? */
static __always_inline int pw_node_direct(__u32 id)
{
	return pw_node_is(id, PW_NODE_DIRECT);
}

/* May packets of its pods come so? */
static __always_inline int pw_node_plain(__u32 id)
{
	return pw_node_is(id, PW_NODE_DIRECT | PW_NODE_PLAIN);
}

static __always_inline struct pw_peer *pw_peer_lookup(const struct pw_addr *addr)
{
	struct pw_peer *peer = bpf_map_lookup_elem(&pw_addrs, addr);
	struct pw_prefix_key k = { .len = 128 };

	if (peer)
		return peer;
	__builtin_memcpy(k.addr, addr->b, 16);
	return bpf_map_lookup_elem(&pw_prefixes, &k);
}

/*
 * The agent changes an entry first and moves its generation afterwards, so
 * the generation is read first and the entry (again) after it: whatever is
 * decided from the entry is at least as new as the generation it carries.
 */
static __always_inline void pw_resolve(const struct pw_addr *addr, struct pw_target *t)
{
	struct pw_endpoint *ep;
	struct pw_peer *peer;

	__builtin_memset(t, 0, sizeof(*t));
	t->addr = *addr;
	addr = &t->addr;
	ep = bpf_map_lookup_elem(&pw_endpoints, addr);
	if (ep) {
		t->gen.slot = ep->slot;
		t->gen.gen = pw_gen(t->gen.slot);
		ep = bpf_map_lookup_elem(&pw_endpoints, addr);
	}
	if (ep) {
		t->ifindex = ep->ifindex;
		t->identity = ep->identity;
		t->policy_in = ep->policy_in;
		t->policy_out = ep->policy_out;
		t->flags = PW_PEER_POD;
		t->place_flags = ep->flags & PW_EP_QDISC ? PW_PLACE_QDISC : 0;
		__builtin_memcpy(t->mac, ep->mac, 6);
		/* Another slot by now: never equal, decided again next time. */
		if (ep->slot != t->gen.slot)
			t->gen.gen -= 1;
		return;
	}
	peer = pw_peer_lookup(addr);
	if (peer) {
		t->gen.slot = peer->slot;
		t->gen.gen = pw_gen(t->gen.slot);
		peer = pw_peer_lookup(addr);
	}
	if (!peer) {
		t->identity = PW_ID_WORLD;
		return;
	}
	t->identity = peer->identity;
	t->node = peer->node;
	t->flags = peer->flags;
	if (peer->slot != t->gen.slot)
		t->gen.gen -= 1;
}

#endif
