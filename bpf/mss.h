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

struct pw_mss_walk {
	struct pw_scratch *s; /* the options in draft.l4, and where we are */
	__u32 n;
	__s32 found;
};

static long pw_mss_step(__u32 i, struct pw_mss_walk *w)
{
	/* In the scratch, so that the verifier does not try every place. */
	__u32 at = w->s->cursor;
	__u8 kind, len;

	if (at + PW_TCPOLEN_MSS > w->n || at > PW_TCP_OPTIONS_MAX - PW_TCPOLEN_MSS)
		return 1;
	kind = w->s->draft.l4[at];
	len = w->s->draft.l4[at + 1];
	if (kind == PW_TCPOPT_NOP) {
		w->s->cursor = at + 1;
		return 0;
	}
	if (kind == PW_TCPOPT_END || len < 2)
		return 1;
	if (kind == PW_TCPOPT_MSS) {
		if (len == PW_TCPOLEN_MSS)
			w->found = at;
		return 1;
	}
	w->s->cursor = at + len;
	return 0;
}

/*
 * Where among n bytes of options the MSS option stands, or -1. bpf_loop: an
 * ordinary loop would be followed through all of its turns.
 */
static __always_inline int pw_find_mss(struct pw_scratch *s, __u32 n)
{
	struct pw_mss_walk w = { .s = s, .n = n, .found = -1 };

	s->cursor = 0;
	bpf_loop(PW_TCP_OPTIONS_MAX, pw_mss_step, &w, 0);
	return w.found;
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
	at = pw_find_mss(s, n);
	if (at < 0 || at > PW_TCP_OPTIONS_MAX)
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
