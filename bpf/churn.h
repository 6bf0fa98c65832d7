/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every write to pw_flows_new. The kernel does not tell what its LRU pushes
 * out; what was put in, less what was taken out and what is there, was.
 */
#ifndef PW_CHURN_H
#define PW_CHURN_H

#include "maps.h"

/* How often a tuple that others write at the same time is written over. */
#define PW_PUT_TRIES 3

static __always_inline struct pw_churn_count *pw_get_churn(void)
{
	__u32 i = PW_CHURN_COUNTED;

	return bpf_map_lookup_elem(&pw_churn, &i);
}

/* 0, or not: the key is there, or there is no room. */
static __always_inline int pw_new_add(const struct pw_flow_key *k, const struct pw_flow *val)
{
	struct pw_churn_count *c;

	if (bpf_map_update_elem(&pw_flows_new, k, val, BPF_NOEXIST))
		return -1;
	c = pw_get_churn();
	if (c)
		c->inserted += 1; /* by hooks alone, see pw_count */
	return 0;
}

/* The same over one that may be there. BPF_ANY would not tell if it was. */
static __always_inline int pw_new_put(const struct pw_flow_key *k, const struct pw_flow *val)
{
	int i;

	for (i = 0; i < PW_PUT_TRIES; i++) {
		if (!bpf_map_update_elem(&pw_flows_new, k, val, BPF_EXIST) || !pw_new_add(k, val))
			return 0;
	}
	return -1;
}

static __always_inline void pw_new_delete(const struct pw_flow_key *k)
{
	struct pw_churn_count *c;

	if (bpf_map_delete_elem(&pw_flows_new, k))
		return; /* it was gone */
	c = pw_get_churn();
	/* A hook may interrupt a sweep that is just counting. */
	if (c)
		__sync_fetch_and_add(&c->removed, 1);
}

#endif
