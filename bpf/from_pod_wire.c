// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Generic XDP at the host-side veth of a pod whose device of the host is over
 * it (a macvlan that takes every unicast frame), so that the tc ingress of the
 * veth is left to others: there, on kernels without tcx, is place for one.
 *
 *   veth: from_pod_wire -> others' ingress qdisc (-> ifb ->) over it: from_pod
 *
 * Before anybody sees a frame it gets a destination that is nobody's: not for
 * all on the link, which macvlan would leave to the stack below from_pod, nor
 * the veth's own. Should nothing be over the veth, the stack takes it for
 * another host's and drops it.
 */
#include "maps.h"

SEC("xdp")
int from_pod_wire(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > end)
		return XDP_DROP;
	__builtin_memset(eth->h_dest, 0, sizeof(eth->h_dest));
	return XDP_PASS;
}
