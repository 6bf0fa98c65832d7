// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * connect() of the node's own processes: TCP to a service goes to a backend
 * directly, and its packets need no translation. A shortcut: whatever is not
 * plain here is left to the hooks that packets pass, which refuse, drop and
 * count, too.
 */
#include "sock.h"

/*
 * Does the host's routing lead there, without translation on the way? Pods
 * outside of their node's ranges have no route, and a backend that is a
 * frontend itself would be translated twice.
 */
static __always_inline int pw_sock_reaches(const struct pw_backend *be)
{
	struct pw_prefix_key k = { .len = 128 };
	struct pw_addr addr = be->addr;
	struct pw_peer *peer;

	if (pw_addr_is_bad_source(&addr) || pw_service_find(&addr, be->port, IPPROTO_TCP, 0))
		return 0;
	peer = bpf_map_lookup_elem(&pw_addrs, &addr);
	if (!peer || !(peer->flags & PW_PEER_POD) || !peer->node)
		return 1;
	__builtin_memcpy(k.addr, addr.b, sizeof(k.addr));
	peer = bpf_map_lookup_elem(&pw_prefixes, &k);
	return peer && peer->flags & PW_PEER_POD;
}

/*
 * May the socket go to a backend under its own address? One that it has not
 * yet the route will choose. One that other nodes do not know as this node's
 * leads no answer back: its packets get another on the way (pw_source).
 */
static __always_inline int pw_sock_source_serves(const struct pw_flow_key *call)
{
	struct pw_addr src = call->src;
	struct pw_peer *peer;

	if (pw_addr_is_zero(&src) || (pw_addr_is_v4(&src) && !pw_addr_word(&src, 3)))
		return 1;
	peer = bpf_map_lookup_elem(&pw_addrs, &src);
	return peer && peer->flags & PW_PEER_INTERNAL;
}

/*
 * The frontend of the call: that of the packets, or a loopback address's own.
 * 0.0.0.0 means loopback here, but any address of the node as a key.
 */
static __always_inline struct pw_service *pw_sock_frontend(const struct pw_flow_key *call)
{
	if (pw_addr_is_loopback(&call->dst))
		return pw_service_lookup(&call->dst, call->dport, call->proto);
	if (pw_addr_is_bad_source(&call->dst))
		return NULL;
	return pw_service_find(&call->dst, call->dport, call->proto, 0);
}

/*
 * A backend for the call, as pw_select would choose it. 1 = there is one. A
 * function that is verified by itself: what is known of an address after one
 * comparison would have the rest followed once more for each.
 */
__noinline int pw_sock_pick(const struct pw_flow_key *call, struct pw_backend *be)
{
	struct pw_service *svc;
	int i;

	if (!call || !be)
		return 0;
	if (!pw_sock_source_serves(call))
		return 0;
	for (i = 0; i < 2; i++) {
		svc = pw_sock_frontend(call);
		if (!svc || !svc->count || svc->flags & PW_SVC_SOURCE_RANGES)
			return 0;
		/* Whose affinity? The route decides, later. */
		if (svc->affinity && pw_addr_is_bad_source(&call->src))
			return 0;
		if (!pw_service_pick(call, svc, 0, &be->addr, &be->port))
			return pw_sock_reaches(be);
	}
	return 0;
}

/*
 * The call's dst and dport become the backend's. What was asked for is kept
 * for getpeername(), and forgotten when the socket calls another.
 */
static __always_inline int pw_sock_translate(struct bpf_sock_addr *ctx, struct pw_flow_key *call)
{
	struct pw_sock_asked asked = { .addr = call->dst, .port = call->dport };
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct pw_backend be = {};

	/* A device that the socket is bound to may not lead to the backend. */
	if (ctx->sk->bound_dev_if || !pw_sock_pick(call, &be)) {
		bpf_map_delete_elem(&pw_sock_rev, &cookie);
		return 0;
	}
	bpf_map_update_elem(&pw_sock_rev, &cookie, &asked, BPF_ANY);
	call->dst = be.addr;
	call->dport = be.port;
	pw_sock_count(PW_SOCK_TRANSLATED, !pw_addr_is_v4(&call->dst));
	return 1;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct pw_flow_key call = { .proto = IPPROTO_TCP };

	if (!pw_sock_is_tcp(ctx) || !pw_sock_of_host(bpf_get_netns_cookie(ctx)))
		return PW_SOCK_OK;
	pw_addr_v4(&call.src, ctx->sk->src_ip4);
	pw_addr_v4(&call.dst, ctx->user_ip4);
	call.dport = bpf_ntohs(ctx->user_port);
	if (!pw_sock_translate(ctx, &call))
		return PW_SOCK_OK;
	ctx->user_ip4 = pw_addr_word(&call.dst, 3);
	ctx->user_port = bpf_htons(call.dport);
	return PW_SOCK_OK;
}

/* IPv4 too, v4-mapped as it is in the maps. */
SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct pw_flow_key call = { .proto = IPPROTO_TCP };
	__u32 *src = (__u32 *)call.src.b, *dst = (__u32 *)call.dst.b;

	if (!pw_sock_is_tcp(ctx) || !pw_sock_of_host(bpf_get_netns_cookie(ctx)))
		return PW_SOCK_OK;
	src[0] = ctx->sk->src_ip6[0];
	src[1] = ctx->sk->src_ip6[1];
	src[2] = ctx->sk->src_ip6[2];
	src[3] = ctx->sk->src_ip6[3];
	dst[0] = ctx->user_ip6[0];
	dst[1] = ctx->user_ip6[1];
	dst[2] = ctx->user_ip6[2];
	dst[3] = ctx->user_ip6[3];
	call.dport = bpf_ntohs(ctx->user_port);
	if (!pw_sock_translate(ctx, &call))
		return PW_SOCK_OK;
	ctx->user_ip6[0] = dst[0];
	ctx->user_ip6[1] = dst[1];
	ctx->user_ip6[2] = dst[2];
	ctx->user_ip6[3] = dst[3];
	ctx->user_port = bpf_htons(call.dport);
	return PW_SOCK_OK;
}
