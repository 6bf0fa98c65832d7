// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* getpeername(): a translated socket's peer is the service that was called. */
#include "sock.h"

static __always_inline struct pw_sock_asked *pw_sock_find(struct bpf_sock_addr *ctx)
{
	__u64 cookie;

	if (!pw_sock_is_tcp(ctx) || !pw_sock_of_host(bpf_get_netns_cookie(ctx)))
		return NULL;
	cookie = bpf_get_socket_cookie(ctx);
	return bpf_map_lookup_elem(&pw_sock_rev, &cookie);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	struct pw_sock_asked *asked = pw_sock_find(ctx);

	if (!asked)
		return PW_SOCK_OK;
	ctx->user_ip4 = pw_addr_word(&asked->addr, 3);
	ctx->user_port = bpf_htons(asked->port);
	return PW_SOCK_OK;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	struct pw_sock_asked *asked = pw_sock_find(ctx);

	if (!asked)
		return PW_SOCK_OK;
	ctx->user_ip6[0] = pw_addr_word(&asked->addr, 0);
	ctx->user_ip6[1] = pw_addr_word(&asked->addr, 1);
	ctx->user_ip6[2] = pw_addr_word(&asked->addr, 2);
	ctx->user_ip6[3] = pw_addr_word(&asked->addr, 3);
	ctx->user_port = bpf_htons(asked->port);
	return PW_SOCK_OK;
}
