// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Single functions of the datapath for tests that call them alone. Not a part
 * of what is installed.
 */
#include "answer.h"
#include "mss.h"

char _license[] SEC("license") = "Dual BSD/GPL";

const volatile __u32 cfg_mtu = 1450;

/* The answer, if there is one, goes back by the device. */
static __always_inline int pw_back(struct __sk_buff *skb, int err)
{
	return err ? PW_SHOT : bpf_redirect(skb->ifindex, 0);
}

SEC("tc")
int part_refuse(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p))
		return PW_NEXT;
	return pw_back(skb, pw_refuse(skb, &p));
}

SEC("tc")
int part_too_big(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p))
		return PW_NEXT;
	return pw_back(skb, pw_too_big(skb, &p, cfg_mtu));
}

SEC("tc")
int part_clamp_mss(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p))
		return PW_NEXT;
	return pw_clamp_mss(skb, &p, cfg_mtu);
}
