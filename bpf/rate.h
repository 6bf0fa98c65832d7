/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Limits of what the datapath itself sends or tells, per CPU. */
#ifndef PW_RATE_H
#define PW_RATE_H

#include "flow.h"

/*
 * May there be one more? Each moves the time that the next one is due, which
 * may lie in the past by as much as the burst takes.
 */
static __always_inline int pw_within(__u64 *due, __u32 per_sec, __u32 burst)
{
	__u64 now = pw_now(), gap = PW_SEC / per_sec, from;

	from = now > burst * gap ? now - burst * gap : 0;
	if (*due < from)
		*due = from;
	if (*due >= now)
		return 0;
	*due += gap;
	return 1;
}

#endif
