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

SEC("tc")
int sweep(struct __sk_buff *skb)
{
	struct pw_flow_key k;
	struct pw_flow *f;
	int i, n = 0;

	for (i = 0; i < PW_SWEEP_MAX; i++) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + i * sizeof(k), &k, sizeof(k)))
			break;
		f = pw_flow_find(&k);
		/* What promotion left behind, while the flow itself lives. */
		if (f && f->flags & PW_F_CONFIRMED)
			bpf_map_delete_elem(&pw_flows_new, &k);
		if (!f || !pw_flow_expired(&k, f) || !pw_flow_claim(&k, f))
			continue;
		pw_count(PW_FLOW_SWEPT, 0, !pw_addr_is_v4(&k.src), 0);
		n++;
	}
	return n;
}
