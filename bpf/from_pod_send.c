// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tc ingress of the device over a pod's veth: what the pod sends, when
 * from_pod_judge has let it through and others' filters had it. Judged again,
 * for it may have waited there; and everything else is as at from_pod, on the
 * pod's own veth. See filtered.h.
 */
#include "filtered.h"
#include "follow.h"

/* A copy of what was for all on the link: the veth has had it. */
static __always_inline int pw_is_copy(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data;

	return (void *)(eth + 1) <= end && eth->h_dest[0] & PW_MAC_GROUP;
}

SEC("tc")
int from_pod_send(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_POD };
	__u32 over = skb->ifindex, *veth;
	struct pw_scratch *s;
	int err;

	if (pw_is_copy(skb))
		return PW_SHOT;
	err = pw_parse(skb, &p);
	veth = bpf_map_lookup_elem(&pw_filtered, &over);
	/* Whose it is, nobody knows by now. */
	if (!veth)
		return pw_drop(skb, &p, PW_DROP_SPOOFED_SOURCE);
	p.from.kind = PW_PLACE_POD;
	p.from.id = *veth;
	if (err == PW_DROP_FRAGMENT)
		return pw_go_fragment(skb, &p);
	/* from_pod_judge leaves none of these to the filters. */
	if (!err && p.kind == PW_KIND_LINK)
		err = PW_DROP_MULTICAST;
	if (err)
		return pw_drop(skb, &p, err);
	s = pw_get_scratch();
	return s ? pw_go_slow(skb, &p, s) : pw_drop(skb, &p, PW_DROP_HELPER);
}
