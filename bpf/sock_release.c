// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The end of a socket: what it had asked for is forgotten. */
#include "sock.h"

SEC("cgroup/sock_release")
int sock_release(struct bpf_sock *sk)
{
	__u64 cookie;

	if (sk->type != SOCK_STREAM || sk->protocol != IPPROTO_TCP ||
	    !pw_sock_of_host(bpf_get_netns_cookie(sk)))
		return PW_SOCK_OK;
	cookie = bpf_get_socket_cookie(sk);
	bpf_map_delete_elem(&pw_sock_rev, &cookie);
	return PW_SOCK_OK;
}
