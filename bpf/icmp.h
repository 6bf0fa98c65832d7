/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP errors belong to the flow of the packet they carry (RFC 792, RFC
 * 4443 3): they pass where that flow passes, whatever the policies say of
 * ICMP, and nothing else does.
 */
#ifndef PW_ICMP_H
#define PW_ICMP_H

#include "decide.h"
#include "flow.h"

/* The embedded packet's tuple, turned round: the direction the error takes. */
__noinline int pw_embedded(struct __sk_buff *skb, __u32 off, __u32 v6, struct pw_flow_key *k)
{
	__be16 ports[2] = {};
	__u8 icmp[8];

	if (!k)
		return PW_DROP_HELPER;
	__builtin_memset(k, 0, sizeof(*k));
	if (v6) {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)) || ip.version != 6)
			return PW_DROP_MALFORMED;
		pw_addr_copy(&k->dst, &ip.saddr);
		pw_addr_copy(&k->src, &ip.daddr);
		if (pw_addr_is_v4(&k->src) || pw_addr_is_v4(&k->dst))
			return PW_DROP_V4_MAPPED;
		/* Extension headers in the quote are not walked: unrelated. */
		k->proto = ip.nexthdr;
		off += sizeof(ip);
	} else {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
			return PW_DROP_MALFORMED;
		/* Only a first fragment carries the ports. */
		if (ip.frag_off & bpf_htons(0x1fff))
			return PW_DROP_ICMP_UNRELATED;
		pw_addr_v4(&k->dst, ip.saddr);
		pw_addr_v4(&k->src, ip.daddr);
		k->proto = ip.protocol;
		off += ip.ihl * 4;
	}
	if (k->proto == IPPROTO_TCP || k->proto == IPPROTO_UDP || k->proto == PW_PROTO_SCTP) {
		if (bpf_skb_load_bytes(skb, off, ports, sizeof(ports)))
			return PW_DROP_MALFORMED;
		k->dport = bpf_ntohs(ports[0]);
		k->sport = bpf_ntohs(ports[1]);
	} else if (k->proto == IPPROTO_ICMP || k->proto == IPPROTO_ICMPV6) {
		if (bpf_skb_load_bytes(skb, off, icmp, sizeof(icmp)))
			return PW_DROP_MALFORMED;
		/* Turned round: the request's identifier is the reply's dport. */
		if (icmp[0] == (v6 ? PW_ICMP6_ECHO : PW_ICMP_ECHO))
			k->dport = (icmp[4] << 8) | icmp[5];
		else
			k->sport = (icmp[4] << 8) | icmp[5];
	}
	return 0;
}

/*
 * Finds the flow an error is about and leaves its action, without
 * translation, in s->fwd. Returns 0 or a reason.
 */
__noinline int pw_icmp_error(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_target *src;
	struct pw_flow *f;
	int err;

	if (!p || !s)
		return PW_DROP_HELPER;
	src = &s->src;
	pw_resolve(&p->key.src, src);
	/* A router on the way may speak, but nobody under a false name. */
	err = pw_check_source(p, src);
	if (err)
		return err;
	err = pw_embedded(skb, p->l4 + sizeof(struct pw_icmphdr), p->v6, &s->embedded);
	if (err)
		return err;
	/* From outside the cluster: of the flows that entered by the same node. */
	s->embedded.via = p->key.via;
	/* It must go to who sent the packet it quotes. */
	if (!pw_addr_eq(&s->embedded.dst, &p->key.dst))
		return PW_DROP_ICMP_UNRELATED;
	f = pw_flow_find(&s->embedded);
	if (!f || pw_flow_expired(&s->embedded, f, PW_SCRATCH_PACKET))
		return PW_DROP_ICMP_UNRELATED;
	/* Decided from what has changed: the flow's next packet tells anew. */
	if (!pw_fresh(f))
		return PW_DROP_ICMP_UNRELATED;
	/* Only from where the flow's own packets come, or from this node. */
	if (p->from.kind != PW_PLACE_HOST && !pw_same_place(&f->from, &p->from))
		return PW_DROP_ICMP_UNRELATED;
	if (f->verdict != PW_VERDICT_ALLOW)
		return f->reason;
	if (f->flags & PW_F_XLATE)
		return PW_DROP_ICMP_TRANSLATED;
	s->fwd = *f;
	return 0;
}

#endif
