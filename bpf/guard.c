// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Netfilter, before routing: what a pod sent and from_pod has not seen. The
 * kernel leaves the programs at a device's ingress out if a packet says so, and
 * one that a pod has led through an ifb of its own may say so. from_pod writes
 * into what it passes to the stack that it did (PW_JUDGED); the kernel takes
 * whatever a pod wrote there off when the packet leaves its namespace.
 *
 * An object of its own: kernels before 6.4 know no such program.
 */
#include "metrics.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define PW_NF_DROP 0
#define PW_NF_ACCEPT 1
#define PW_NFPROTO_IPV6 10

/* What is used of the kernel's, wherever it is there. */
#define PW_OF_KERNEL __attribute__((preserve_access_index))

struct net_device {
	char name[16];
} PW_OF_KERNEL;

struct sk_buff {
	unsigned int len;
	__u32 priority;
} PW_OF_KERNEL;

struct nf_hook_state {
	__u8 pf;
	struct net_device *in;
} PW_OF_KERNEL;

struct bpf_nf_ctx {
	const struct nf_hook_state *state;
	struct sk_buff *skb;
};

/* The name's digits: see endpoint.HostIfName. */
#define PW_VETH_DIGITS 11

/* A pod's host-side veth, and no other device of ours. */
static __always_inline int pw_is_veth(const struct net_device *dev)
{
	int i;

	if (dev->name[0] != 'p' || dev->name[1] != 'w')
		return 0;
#pragma unroll
	for (i = 2; i < 2 + PW_VETH_DIGITS; i++) {
		char c = dev->name[i];

		if (!(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'f'))
			return 0;
	}
	return !dev->name[2 + PW_VETH_DIGITS];
}

SEC("netfilter")
int guard(struct bpf_nf_ctx *ctx)
{
	const struct nf_hook_state *state = ctx->state;
	struct sk_buff *skb = ctx->skb;

	if (skb->priority == PW_JUDGED || !pw_is_veth(state->in))
		return PW_NF_ACCEPT;
	pw_count(PW_DROP_UNJUDGED, PW_FROM_POD, state->pf == PW_NFPROTO_IPV6, skb->len);
	return PW_NF_DROP;
}
