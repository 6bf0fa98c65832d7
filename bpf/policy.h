/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The compiled verdict: at most three hash probes, whatever the rules, and one
 * more where a ClusterNetworkPolicy is about the pod and no entry about the
 * peer.
 */
#ifndef PW_POLICY_H
#define PW_POLICY_H

#include "parse.h"
#include "maps.h"

static __always_inline int pw_has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == PW_PROTO_SCTP;
}

/*
 * May a peer of this identity use proto and port (the destination's, after
 * translation) under this table? Returns enum pw_verdict; *rule names the
 * rule, 0 when none matched. Table 0 = not isolated. Who has no identity is
 * not let in by a default.
 */
static __always_inline int pw_policy_verdict(__u32 table, __u32 identity, __u8 proto, __u16 port,
					     __u32 *rule)
{
	struct pw_policy_key k = { .table = table, .identity = identity };
	struct pw_policy_entry *e = NULL;
	__u32 index = port;
	__u16 *class;

	if (!table)
		return PW_VERDICT_ALLOW;
	if (pw_has_ports(proto)) {
		k.proto = proto;
		k.port = port;
		k.kind = PW_POL_PORT;
		e = bpf_map_lookup_elem(&pw_policy, &k);
		if (!e) {
			class = bpf_map_lookup_elem(&pw_port_class, &index);
			k.port = class ? *class : 0;
			k.kind = PW_POL_CLASS;
			e = bpf_map_lookup_elem(&pw_policy, &k);
		}
	}
	if (!e) {
		k.proto = 0;
		k.port = 0;
		k.kind = PW_POL_ANY;
		e = bpf_map_lookup_elem(&pw_policy, &k);
	}
	if (!e && table & PW_TABLE_DEFAULT && identity != PW_ID_UNKNOWN) {
		k.identity = 0;
		k.kind = PW_POL_DEFAULT;
		e = bpf_map_lookup_elem(&pw_policy, &k);
	}
	if (!e)
		return PW_VERDICT_DENY;
	*rule = e->rule;
	return e->verdict;
}

#endif
