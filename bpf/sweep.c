// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Run by the agent, never attached. The "packet" is an Ethernet header and
 * up to PW_SWEEP_MAX flow keys that looked idle when the agent read them;
 * those that still are get removed here, where the check and the removal can
 * be made to exclude a packet that revives or takes over the tuple.
 * Returns how many were removed.
 */
#include "flow.h"
#include "metrics.h"

#define PW_SWEEP_MAX 64

struct pw_sweep {
	struct __sk_buff *skb;
	__u32 removed;
};

static long pw_sweep_one(__u32 i, struct pw_sweep *c)
{
	struct pw_flow_key k;
	struct pw_flow *f;

	if (bpf_skb_load_bytes(c->skb, ETH_HLEN + i * sizeof(k), &k, sizeof(k)))
		return 1;
	f = pw_flow_find(&k);
	/* What programs of before have left, and a race may: a copy of a flow that lives. */
	if (f && f->flags & PW_F_CONFIRMED)
		pw_new_delete(&k);
	if (!f || !pw_flow_expired(&k, f, PW_SCRATCH_SWEEP) ||
	    !pw_flow_claim(&k, f, PW_SCRATCH_SWEEP))
		return 0;
	pw_count(PW_FLOW_SWEPT, 0, !pw_addr_is_v4(&k.src), 0);
	c->removed++;
	return 0;
}

/* bpf_loop: 6.1 would follow an ordinary loop through every one of its turns. */
SEC("tc")
int sweep(struct __sk_buff *skb)
{
	struct pw_sweep c = { .skb = skb };

	bpf_loop(PW_SWEEP_MAX, pw_sweep_one, &c, 0);
	return c.removed;
}
