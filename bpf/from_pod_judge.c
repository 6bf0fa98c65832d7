// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * In place of from_pod where others have filters at the ingress of the pod's
 * veth: they come before a packet is sent on. See filtered.h. Known flows, too,
 * go by the slow path, here and behind the filters: few pods have such, whose
 * packets have a long way anyhow, and every agent's start has to load this.
 */
#include "filtered.h"
#include "follow.h"

SEC("tc")
int from_pod_judge(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_POD };
	struct pw_scratch *s;
	int err = pw_parse(skb, &p);

	p.from.kind = PW_PLACE_POD;
	p.from.id = skb->ifindex;
	p.from.flags = PW_PLACE_COVERED;
	/* Until the device over it is ready everything is sent on from here. */
	if (bpf_map_lookup_elem(&pw_filtered, &p.from.id))
		p.from.flags |= PW_PLACE_FILTERED;
	if (err == PW_DROP_FRAGMENT)
		return pw_go_fragment(skb, &p);
	if (err)
		return pw_drop(skb, &p, err);
	if (p.kind == PW_KIND_LINK) {
		pw_stay(skb, &p);
		pw_tell_judged(skb, &p);
		return pw_pass(skb, &p);
	}
	s = pw_get_scratch();
	return s ? pw_go_slow(skb, &p, s) : pw_drop(skb, &p, PW_DROP_HELPER);
}
