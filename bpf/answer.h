/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The datapath's own answers. A packet that nobody serves, or that is too
 * large, is turned in place into what a host would answer, and goes back
 * where it came from.
 *
 * The answer is written whole, with final checksums. So that nothing
 * downstream computes another over it, the packet first loses whatever the
 * kernel knows of its old checksum, see pw_draft_store.
 */
#ifndef PW_ANSWER_H
#define PW_ANSWER_H

#include "decide.h"
#include "deliver.h"
#include "event.h"
#include "nat.h"
#include "policy.h"
#include "rate.h"
#include "scratch.h"

#define PW_ANSWER_TTL 64
#define PW_ERROR_BURST 50
#define PW_CSUM_CHUNK 512 /* what bpf_csum_diff takes at once */
#define PW_PACKET_BROADCAST 1
#define PW_PACKET_MULTICAST 2

/* An ICMP error may be this long as an IP packet (RFC 1812, RFC 4443). */
#define PW_ERROR_MAX_V4 576
#define PW_ERROR_MAX_V6 1280

#define PW_FRAME_MIN (ETH_HLEN + sizeof(struct iphdr) + sizeof(struct pw_icmphdr))
#define PW_FRAME_MAX (ETH_HLEN + PW_ERROR_MAX_V6)

enum pw_error_code {
	PW_ICMP_PORT_UNREACHABLE = 3,
	PW_ICMP_REDIRECT = 5,
	PW_ICMP6_UNREACHABLE = 1,
	PW_ICMP6_TIME_EXCEEDED = 3,
	PW_ICMP6_PORT_UNREACHABLE = 4,
	PW_ICMP6_REDIRECT = 137,
};

static __always_inline __u32 pw_ip_len(const struct pw_pkt *p)
{
	return p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
}

/* May this packet be answered at all (RFC 1122 3.2.2, RFC 4443 2.4)? */
static __always_inline int pw_answerable(const struct __sk_buff *skb, const struct pw_pkt *p)
{
	return (p->kind == PW_KIND_FLOW || p->kind == PW_KIND_FIRST) && p->l3 == ETH_HLEN &&
	       p->l4 >= ETH_HLEN + pw_ip_len(p) && skb->pkt_type != PW_PACKET_BROADCAST &&
	       skb->pkt_type != PW_PACKET_MULTICAST && !pw_addr_is_multicast(&p->key.dst) &&
	       !pw_addr_is_bad_source(&p->key.src);
}

/*
 * The checksum of the answer's transport part. A v4-mapped address adds what
 * its last word adds: 0xffff is zero here.
 */
static __always_inline __u16 pw_draft_sum(const struct pw_pkt *p, struct pw_draft *d, __u32 len,
					  __u8 proto, int pseudo)
{
	__u32 left = (len + 3) & ~3U, sum = 0, n;
	__u64 all;
	int i;

	for (i = 0; i < 3; i++) {
		n = left < PW_CSUM_CHUNK ? left : PW_CSUM_CHUNK;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)(d->l4 + i * PW_CSUM_CHUNK), n, sum);
		left -= n;
		if (!left)
			break;
	}
	all = sum;
	if (pseudo) {
		for (i = 0; i < 4; i++) {
			all += pw_addr_word(&p->key.src, i);
			all += pw_addr_word(&p->key.dst, i);
		}
		all += bpf_htonl(len);
		all += bpf_htonl(proto);
	}
	return ~pw_fold(all);
}

/* The headers before the answer's transport part, addresses turned round. */
static __always_inline int pw_draft_head(struct __sk_buff *skb, const struct pw_pkt *p,
					 struct pw_draft *d, __u32 len, __u8 proto)
{
	struct iphdr *ip = (void *)(d->l4 - sizeof(*ip));
	struct ipv6hdr *ip6 = (void *)(d->l4 - sizeof(*ip6));
	__u32 v4_len = sizeof(*ip) + len;
	struct ethhdr in, *eth;

	if (bpf_skb_load_bytes(skb, 0, &in, sizeof(in)))
		return -1;
	if (p->v6) {
		__builtin_memset(ip6, 0, sizeof(*ip6));
		ip6->version = 6;
		ip6->payload_len = bpf_htons(len);
		ip6->nexthdr = proto;
		ip6->hop_limit = PW_ANSWER_TTL;
		__builtin_memcpy(&ip6->saddr, p->key.dst.b, 16);
		__builtin_memcpy(&ip6->daddr, p->key.src.b, 16);
		eth = (void *)ip6 - sizeof(*eth);
	} else {
		__builtin_memset(ip, 0, sizeof(*ip));
		ip->version = 4;
		ip->ihl = 5;
		ip->tot_len = bpf_htons(v4_len);
		/* Never fragmented, so it needs no identification (RFC 6864). */
		ip->frag_off = bpf_htons(0x4000);
		ip->ttl = PW_ANSWER_TTL;
		ip->protocol = proto;
		ip->saddr = pw_addr_word(&p->key.dst, 3);
		ip->daddr = pw_addr_word(&p->key.src, 3);
		ip->check = ~pw_fold((__u32)bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
		eth = (void *)ip - sizeof(*eth);
	}
	__builtin_memcpy(eth->h_dest, in.h_source, 6);
	__builtin_memcpy(eth->h_source, in.h_dest, 6);
	eth->h_proto = in.h_proto;
	return 0;
}

/*
 * Makes the packet as long as the answer, whose frame and transport part are
 * that long. Returns 0, or -1: not so, and the packet is of any length.
 *
 * The old packet's checksum may be left to a device (CHECKSUM_PARTIAL), which
 * would later write a sum into the answer. A program cannot change that, nor
 * read it; but the kernel drops the request when the place where the sum
 * starts is taken off the packet's front. So all of it is taken off, and room
 * made again, which leaves the transport header where the answer has it.
 * Should the sum start beyond what is taken off, then the first step fails, or
 * the last, because it would cut the sum's own field off. What a device said of
 * the old packet's checksum (UNNECESSARY, COMPLETE) is forgotten in the same
 * steps, and segmentation in the first.
 */
static __always_inline int pw_draft_fit(struct __sk_buff *skb, const struct pw_pkt *p, __u32 frame,
					__u32 len)
{
	__u32 cut = frame + p->l4, room = cut - (p->l4 - (frame - len));

	if (bpf_skb_change_tail(skb, frame + cut, 0) ||
	    bpf_skb_adjust_room(skb, -(__s32)cut, BPF_ADJ_ROOM_MAC, 0) ||
	    bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_MAC, 0) ||
	    bpf_skb_change_tail(skb, frame, 0))
		return -1;
	return 0;
}

/* The kernel moves a packet's front by no more at once; and how often we do. */
#define PW_ROOM_MAX 0xfff
#define PW_ROOM_CUTS 4

/*
 * The same for a packet whose end no program may move, because it still counts
 * as encapsulated: it has come out of a tunnel header, by a device that says so,
 * or a pod has a tunnel of its own. And for one with its sum so far inside.
 *
 * All but what must stay is taken off the front, and room for the whole answer
 * made before it. The rest is padding: the IP header says where the answer ends,
 * as in a frame that a link has padded. A sum that a device is to write starts
 * either in what is taken off, and is forgotten, or in the padding, and does no
 * harm there. (A stack that is handed it like that drops it. Only a pod's own
 * tunnel gets there, when it carries next to nothing: what goes back through
 * ours is left by its device, which writes the sum.)
 *
 * Segmentation is not forgotten, and a device would cut the answer.
 */
static __always_inline int pw_draft_pad(struct __sk_buff *skb, const struct pw_pkt *p, __u32 frame)
{
	__u32 keep = ETH_HLEN + pw_ip_len(p), over;
	int i;

	if (skb->gso_size)
		return -1;
#pragma unroll
	for (i = 0; i < PW_ROOM_CUTS; i++) {
		over = skb->len - keep;
		if (skb->len <= keep)
			break;
		if (over > PW_ROOM_MAX)
			over = PW_ROOM_MAX;
		if (bpf_skb_adjust_room(skb, -(__s32)over, BPF_ADJ_ROOM_MAC, 0))
			return -1;
	}
	return skb->len > keep || bpf_skb_adjust_room(skb, frame, BPF_ADJ_ROOM_MAC, 0) ? -1 : 0;
}

/* Puts the draft in the packet's place; len is that of its transport part. */
static __always_inline int pw_draft_store(struct __sk_buff *skb, const struct pw_pkt *p,
					  struct pw_draft *d, __u32 len)
{
	__u32 head = ETH_HLEN + pw_ip_len(p), frame = head + len;
	void *from = d->l4 - head;

	if (pw_draft_fit(skb, p, frame, len) && pw_draft_pad(skb, p, frame))
		return -1;
	barrier_var(frame);
	if (frame > PW_FRAME_MAX)
		return -1;
	barrier_var(frame);
	if (frame < PW_FRAME_MIN)
		return -1;
	return bpf_skb_store_bytes(skb, 0, from, frame, 0) ? -1 : 0;
}

/* RFC 9293 3.10.7.1: what a closed port answers. */
static __always_inline int pw_reset(struct __sk_buff *skb, struct pw_pkt *p, struct pw_draft *d)
{
	struct tcphdr *rst = (void *)d->l4;
	__u32 len = pw_packet_len(skb, p), headers;
	struct tcphdr in;

	if (p->tcp_flags & PW_TCP_RST_BIT || bpf_skb_load_bytes(skb, p->l4, &in, sizeof(in)))
		return -1;
	headers = p->l4 - ETH_HLEN + in.doff * 4;
	if (len < headers)
		return -1;
	__builtin_memset(rst, 0, sizeof(*rst));
	rst->source = in.dest;
	rst->dest = in.source;
	rst->doff = sizeof(*rst) / 4;
	rst->rst = 1;
	if (p->tcp_flags & PW_TCP_ACK) {
		rst->seq = in.ack_seq;
	} else {
		rst->ack = 1;
		rst->ack_seq =
			bpf_htonl(bpf_ntohl(in.seq) + len - headers +
				  !!(p->tcp_flags & PW_TCP_SYN) + !!(p->tcp_flags & PW_TCP_FIN));
	}
	rst->check = pw_draft_sum(p, d, sizeof(*rst), IPPROTO_TCP, 1);
	if (pw_draft_head(skb, p, d, sizeof(*rst), IPPROTO_TCP))
		return -1;
	return pw_draft_store(skb, p, d, sizeof(*rst));
}

/*
 * An ICMP error about the packet; rest is the header's second word. Verified
 * once, not for every error and family.
 */
__noinline int pw_error(struct __sk_buff *skb, struct pw_pkt *p, __u32 type, __u32 code, __u32 rest)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_icmphdr *icmp;
	__u32 max, quote, len;
	struct pw_draft *d;
	__u8 proto;

	if (!p || !s)
		return -1;
	d = &s->draft;
	icmp = (void *)d->l4;
	proto = p->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	max = p->v6 ? PW_ERROR_MAX_V6 : PW_ERROR_MAX_V4;
	quote = pw_packet_len(skb, p);
	max -= pw_ip_len(p) + sizeof(*icmp);
	if (quote > max)
		quote = max;
	barrier_var(quote);
	if (quote > PW_QUOTE_MAX)
		return -1;
	/* Or clang makes one comparison of two, and the verifier sees none. */
	barrier_var(quote);
	if (quote < sizeof(struct iphdr))
		return -1;
	icmp->type = type;
	icmp->code = code;
	icmp->check = 0;
	__builtin_memcpy(&icmp->id, &rest, sizeof(rest));
	/* The checksum is taken over whole words. */
	*(__u32 *)(d->l4 + sizeof(*icmp) + (quote & ~3U)) = 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, d->l4 + sizeof(*icmp), quote))
		return -1;
	len = sizeof(*icmp) + quote;
	icmp->check = pw_draft_sum(p, d, len, proto, p->v6);
	if (pw_draft_head(skb, p, d, len, proto))
		return -1;
	return pw_draft_store(skb, p, d, len);
}

/* 0: the packet is the answer now. Else it must be dropped, unanswered. */
__noinline int pw_refuse(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();

	if (!p || !s || !pw_answerable(skb, p) || !pw_has_ports(p->key.proto))
		return -1;
	if (p->key.proto == IPPROTO_TCP)
		return pw_reset(skb, p, &s->draft);
	if (p->v6)
		return pw_error(skb, p, PW_ICMP6_UNREACHABLE, PW_ICMP6_PORT_UNREACHABLE, 0);
	return pw_error(skb, p, PW_ICMP_UNREACHABLE, PW_ICMP_PORT_UNREACHABLE, 0);
}

/* Redirects are errors, too: they are not answered by one. */
static __always_inline int pw_is_redirect(struct __sk_buff *skb, const struct pw_pkt *p)
{
	__u8 type;

	if (p->key.proto != IPPROTO_ICMP && p->key.proto != IPPROTO_ICMPV6)
		return 0;
	return bpf_skb_load_bytes(skb, p->l4, &type, sizeof(type)) ||
	       type == (p->v6 ? PW_ICMP6_REDIRECT : PW_ICMP_REDIRECT);
}

/*
 * A router speaks under its own name: the address of the device that the
 * packet came in by, or the node's. p->key.dst is the answer's source.
 */
static __always_inline void pw_speak_as_router(const struct __sk_buff *skb, struct pw_pkt *p)
{
	__u32 ifindex, node = 0;
	const struct pw_addr *a;
	struct pw_dev_addr *own;

	barrier_var(skb);
	ifindex = p->hook == PW_FROM_NETDEV ? pw_device(skb) : 0;
	own = bpf_map_lookup_elem(&pw_dev_addrs, &ifindex);
	if (!own)
		own = bpf_map_lookup_elem(&pw_dev_addrs, &node);
	if (!own)
		return;
	a = p->v6 ? &own->v6 : &own->v4;
	/* Without an address of the family: who was called hides the node. */
	if (!pw_addr_is_zero(a))
		p->key.dst = *a;
}

/* The same for a packet whose time has ended here (RFC 1812 5.3.1). */
__noinline int pw_time_exceeded(struct __sk_buff *skb, struct pw_pkt *p)
{
	if (!p || !pw_answerable(skb, p) || pw_is_redirect(skb, p))
		return -1;
	pw_speak_as_router(skb, p);
	if (p->v6)
		return pw_error(skb, p, PW_ICMP6_TIME_EXCEEDED, 0, 0);
	return pw_error(skb, p, PW_ICMP_TIME_EXCEEDED, 0, 0);
}

/*
 * The same for a packet that does not fit its way (RFC 1191, RFC 4443 3.2).
 * Not an answer: one that may be fragmented.
 */
__noinline int pw_too_big(struct __sk_buff *skb, struct pw_pkt *p, __u32 mtu)
{
	__be16 frag;

	if (!p || !pw_answerable(skb, p) || pw_is_redirect(skb, p))
		return -1;
	if (!p->v6 && (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, frag_off), &frag,
					  sizeof(frag)) ||
		       !(frag & bpf_htons(0x4000))))
		return -1;
	/* Clients outside are told by the address they called: it reaches them. */
	if (p->hook != PW_FROM_NETDEV)
		pw_speak_as_router(skb, p);
	if (p->v6)
		return pw_error(skb, p, PW_ICMP6_TOO_BIG, 0, bpf_htonl(mtu));
	return pw_error(skb, p, PW_ICMP_UNREACHABLE, PW_ICMP_FRAG_NEEDED, bpf_htonl(mtu & 0xffff));
}

/* Back through the tunnel that it came out of. */
static __always_inline int pw_send_to_peer(struct __sk_buff *skb, const struct pw_pkt *p)
{
	__u32 id = p->from.id;
	struct pw_node *node = bpf_map_lookup_elem(&pw_nodes, &id);

	if (!node || pw_write_macs(skb, node->mac, NULL, 0) || pw_set_tunnel(skb, node))
		return PW_SHOT;
	skb->mark |= cfg_mark;
	return bpf_redirect(cfg_overlay_ifindex, 0);
}

/*
 * Back to the sender, whose address the answer has. What this host sent
 * enters its stack by the tunnel's device, see pw_to_host.
 */
static __always_inline int pw_send_back(struct __sk_buff *skb, const struct pw_pkt *p)
{
	__u32 ifindex;

	/*
	 * By its own device, where another may be over it; and not to its peer,
	 * which what is over a veth from the beginning does not have.
	 */
	if (p->hook == PW_FROM_POD) {
		skb->mark |= cfg_mark;
		return bpf_redirect(p->from.id, 0);
	}
	/* Or clang keeps the field's address, which the verifier refuses. */
	barrier_var(skb);
	ifindex = pw_device(skb);
	if (p->hook == PW_FROM_OVERLAY || p->stripped)
		return pw_send_to_peer(skb, p);
	skb->mark |= cfg_mark;
	if (p->hook == PW_FROM_NETDEV)
		return bpf_redirect(ifindex, 0);
	return bpf_redirect(cfg_overlay_ifindex, BPF_F_INGRESS);
}

/* Is there a way back from this hook? */
static __always_inline int pw_has_way_back(const struct pw_pkt *p)
{
	switch (p->hook) {
	case PW_FROM_POD:
		return 1;
	case PW_FROM_NETDEV:
		if (!p->stripped)
			return 1;
		/* By the tunnel that it came out of. */
		return p->from.kind == PW_PLACE_NODE && cfg_overlay_ifindex;
	case PW_FROM_OVERLAY:
		return p->from.kind == PW_PLACE_NODE && cfg_overlay_ifindex;
	case PW_TO_OVERLAY:
	case PW_TO_LO:
	case PW_TO_NETDEV:
		return p->from.kind == PW_PLACE_HOST && cfg_overlay_ifindex;
	}
	return 0;
}

/*
 * Errors to outside are limited: whoever sends under false names would have
 * us trouble others.
 */
static __always_inline int pw_may_err(const struct pw_pkt *p, struct pw_scratch *s)
{
	if (p->hook == PW_FROM_POD || !cfg_errors_per_sec)
		return 1;
	return pw_within(&s->error_due, cfg_errors_per_sec, PW_ERROR_BURST);
}

/* The same where TCP is answered by a reset, which is none. */
static __always_inline int pw_may_tell(const struct pw_pkt *p, struct pw_scratch *s)
{
	return p->hook != PW_FROM_NETDEV || p->key.proto == IPPROTO_TCP || pw_may_err(p, s);
}

/*
 * Tells the sender of a packet that does not fit (see pw_limit) how large it
 * may be. Returns 1 when the packet is the answer now.
 */
static __always_inline int pw_tell_mtu(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_addr called = p->key.dst;
	__u32 len = skb->len;

	if (!s || !pw_has_way_back(p) || !pw_may_tell(p, s))
		return 0;
	if (pw_too_big(skb, p, s->mtu)) {
		p->key.dst = called;
		return 0;
	}
	pw_count(PW_DROP_TOO_BIG, p->hook, p->v6, len);
	pw_count(PW_TOO_BIG_SENT, p->hook, p->v6, skb->len);
	return 1;
}

/* The end of a packet whose time has ended: its sender is told, if it may be. */
static __always_inline int pw_tell_ttl(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();

	pw_count(PW_DROP_TTL, p->hook, p->v6, skb->len);
	if (!s || !pw_has_way_back(p) || !pw_may_err(p, s) || pw_time_exceeded(skb, p))
		return PW_SHOT;
	pw_count(PW_TTL_SENT, p->hook, p->v6, skb->len);
	return pw_send_back(skb, p);
}

/* The end of a packet that is not let through: dropped, and maybe answered. */
static __always_inline int pw_answer(struct __sk_buff *skb, struct pw_pkt *p, __u32 reason)
{
	struct pw_scratch *s = pw_get_scratch();
	int act = pw_drop(skb, p, reason);

	pw_tell(p, reason);
	if (reason != PW_DROP_NO_BACKEND && reason != PW_DROP_NO_SERVICE_PORT)
		return act;
	if (!s || !pw_has_way_back(p) || !pw_may_tell(p, s) || pw_refuse(skb, p))
		return act;
	pw_count(PW_REFUSED, p->hook, p->v6, skb->len);
	return pw_send_back(skb, p);
}

#endif
