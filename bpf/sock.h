/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the programs at sockets share. They run in a process, which packets
 * may interrupt: no scratch of theirs, and counters are added to atomically.
 */
#ifndef PW_SOCK_H
#define PW_SOCK_H

#include "metrics.h"
#include "service.h"

#ifndef SOCK_STREAM
#define SOCK_STREAM 1
#endif

/* What a program at a socket returns: go on. Nothing is ever forbidden. */
#define PW_SOCK_OK 1

static __always_inline void pw_sock_count(__u32 reason, __u32 v6)
{
	struct pw_counter *c = pw_counter_of(reason, PW_SOCKET, v6);

	if (c)
		__sync_fetch_and_add(&c->packets, 1);
}

/* A process of the node itself: pods have namespaces of their own. */
static __always_inline int pw_sock_of_host(__u64 netns_cookie)
{
	return cfg_netns_cookie && netns_cookie == cfg_netns_cookie;
}

/* MPTCP shows the TCP sockets it is made of, one by one. */
static __always_inline int pw_sock_is_tcp(const struct bpf_sock_addr *ctx)
{
	return ctx->type == SOCK_STREAM && ctx->protocol == IPPROTO_TCP;
}

#endif
