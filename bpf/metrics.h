/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Counting: every packet that ends at a hook is counted under one reason. */
#ifndef PW_METRICS_H
#define PW_METRICS_H

#include "maps.h"

static __always_inline struct pw_counter *pw_counter_of(__u32 reason, __u32 hook, __u32 v6)
{
	__u32 i = ((reason & (PW_REASON_MAX - 1)) * PW_HOOK_MAX + hook) * 2 + (v6 & 1);

	return bpf_map_lookup_elem(&pw_metrics, &i);
}

static __always_inline void pw_count(__u32 reason, __u32 hook, __u32 v6, __u32 bytes)
{
	struct pw_counter *c = pw_counter_of(reason, hook, v6);

	if (!c)
		return;
	/* Per CPU and not preempted by another hook: no atomics. */
	c->packets += 1;
	c->bytes += bytes;
}

#endif
