/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The MSS of TCP that enters the tunnel: its far end would else send segments
 * that do not fit. A segment without the option promises 536 bytes (RFC 9293
 * 3.7.1), which always do.
 */
#ifndef PW_MSS_H
#define PW_MSS_H

#include "scratch.h"

#define PW_TCP_OPTIONS_MAX 40
#define PW_TCPOPT_END 0
#define PW_TCPOPT_NOP 1
#define PW_TCPOPT_MSS 2
#define PW_TCPOLEN_MSS 4

/* Where among n bytes of options the MSS option stands, or -1. */
static __always_inline int pw_find_mss(const __u8 *opts, __u32 n)
{
	__u32 at = 0;
	__u8 kind, len;
	int i;

	for (i = 0; i < PW_TCP_OPTIONS_MAX; i++) {
		if (at + PW_TCPOLEN_MSS > n || at > PW_TCP_OPTIONS_MAX - PW_TCPOLEN_MSS)
			return -1;
		kind = opts[at];
		len = opts[at + 1];
		if (kind == PW_TCPOPT_NOP) {
			at++;
			continue;
		}
		if (kind == PW_TCPOPT_END || len < 2)
			return -1;
		if (kind == PW_TCPOPT_MSS)
			return len == PW_TCPOLEN_MSS ? (int)at : -1;
		at += len;
	}
	return -1;
}

/*
 * Lowers the MSS of a SYN or SYN-ACK to what packets of mtu bytes carry; 1 if
 * it was larger. Options that make no sense are left alone.
 */
__noinline int pw_clamp_mss(struct __sk_buff *skb, struct pw_pkt *p, __u32 mtu)
{
	struct pw_scratch *s = pw_get_scratch();
	__be16 from, to;
	__u32 off, n;
	__u8 doff;
	int at;

	if (!p || !s || p->key.proto != IPPROTO_TCP || !(p->tcp_flags & PW_TCP_SYN))
		return 0;
	n = sizeof(struct tcphdr) + (p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	if (mtu <= n || mtu - n > 0xffff)
		return 0;
	to = bpf_htons(mtu - n);
	off = p->l4 + sizeof(struct tcphdr);
	if (bpf_skb_load_bytes(skb, p->l4 + 12, &doff, sizeof(doff)))
		return 0;
	n = (doff >> 4) * 4 - sizeof(struct tcphdr);
	barrier_var(n);
	if (n > PW_TCP_OPTIONS_MAX)
		return 0;
	/* Or clang makes one comparison of two, and the verifier sees none. */
	barrier_var(n);
	if (n < PW_TCPOLEN_MSS || bpf_skb_load_bytes(skb, off, s->draft.l4, n))
		return 0;
	at = pw_find_mss(s->draft.l4, n);
	if (at < 0)
		return 0;
	off += at + 2;
	if (bpf_skb_load_bytes(skb, off, &from, sizeof(from)) || bpf_ntohs(from) <= bpf_ntohs(to) ||
	    bpf_skb_store_bytes(skb, off, &to, sizeof(to), 0))
		return 0;
	/* At an odd place the two bytes count the other way round. */
	if (at & 1) {
		from = __builtin_bswap16(from);
		to = __builtin_bswap16(to);
	}
	bpf_l4_csum_replace(skb, p->l4 + offsetof(struct tcphdr, check), from, to, sizeof(to));
	return 1;
}

#endif
