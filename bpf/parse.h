/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From bytes to a tuple. Only this file, nat.h and icmp.h know the two
 * families' headers; everything after works on 128-bit addresses.
 */
#ifndef PW_PARSE_H
#define PW_PARSE_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "settings.h"
#include "types.h"

#define PW_AF_INET 2
#define PW_AF_INET6 10

#define PW_TCP_FIN 0x01
#define PW_TCP_SYN 0x02
#define PW_TCP_RST_BIT 0x04
#define PW_TCP_ACK 0x10

#define PW_IP_MF_OFFSET 0x3fff /* more-fragments bit and fragment offset */
#define PW_EXT_HEADERS_MAX 6
#define PW_NEXTHDR_HOP 0
#define PW_NEXTHDR_ROUTING 43
#define PW_NEXTHDR_FRAGMENT 44
#define PW_NEXTHDR_AUTH 51
#define PW_NEXTHDR_DEST 60
#define PW_PROTO_SCTP 132

/* How much of a frame must be linear: Ethernet, IPv6, some extensions, TCP. */
#define PW_PULL 192

/* The kernel's icmp.h draws in the C library; this is what is used of it. */
struct pw_icmphdr {
	__u8 type;
	__u8 code;
	__be16 check;
	__be16 id; /* of echo messages */
	__be16 seq;
};

enum pw_icmp_type {
	PW_ICMP_ECHO_REPLY = 0,
	PW_ICMP_UNREACHABLE = 3,
	PW_ICMP_QUENCH = 4,
	PW_ICMP_ECHO = 8,
	PW_ICMP_TIME_EXCEEDED = 11,
	PW_ICMP_PARAMETER = 12,
	PW_ICMP_FRAG_NEEDED = 4, /* code of UNREACHABLE */
	PW_ICMP6_TOO_BIG = 2,
	PW_ICMP6_INFO = 128, /* below: errors */
	PW_ICMP6_ECHO = 128,
	PW_ICMP6_ECHO_REPLY = 129,
	PW_ICMP6_LINK_FIRST = 130, /* MLD, then neighbour discovery */
	PW_ICMP6_LINK_LAST = 137,
	PW_ICMP6_MLD2 = 143,
};

enum pw_kind {
	PW_KIND_NONE = 0, /* addresses not known */
	PW_KIND_FLOW,     /* key is complete */
	PW_KIND_ICMP_ERROR, /* l4 points at the ICMP header; ports are 0 */
	PW_KIND_LINK,     /* ARP, neighbour discovery, MLD: the link's own */
	PW_KIND_FIRST,    /* in the slow path: PW_KIND_FLOW, the first fragment */
	PW_KIND_LATER,    /* the same of another, which has no transport header */
};

struct pw_pkt {
	struct pw_flow_key key;
	struct pw_place from;
	__u16 l3;        /* offset of the IP header */
	__u16 l4;        /* offset of the transport header */
	__u16 headers;   /* length of IP and transport headers */
	__u8 ecn;        /* the two ECN bits (RFC 3168) */
	__u8 service;    /* from outside to a service's address, or about a call of ours */
	__u8 kind;       /* enum pw_kind */
	__u8 v6;
	__u8 ttl;        /* TTL or hop limit as it arrived */
	__u8 tcp_flags;
	__u8 hook;       /* enum pw_hook */
	__u8 stripped;   /* out of a tunnel header that we took off */
	__u8 missed;     /* neither flow table has the key, as of just now */
	__u8 known;      /* in the slow path: of the flow in the scratch, see pw_limit */
};

static __always_inline void pw_addr_v4(struct pw_addr *a, __be32 v4)
{
	__u32 *w = (__u32 *)a->b;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0xffff);
	w[3] = v4;
}

static __always_inline __be32 pw_addr_word(const struct pw_addr *a, int i)
{
	return ((const __u32 *)a->b)[i];
}

static __always_inline void pw_addr_copy(struct pw_addr *to, const void *from)
{
	__u32 *d = (__u32 *)to->b;
	const __u32 *s = from;

	d[0] = s[0];
	d[1] = s[1];
	d[2] = s[2];
	d[3] = s[3];
}

static __always_inline int pw_addr_eq(const struct pw_addr *a, const struct pw_addr *b)
{
	const __u64 *x = (const __u64 *)a->b, *y = (const __u64 *)b->b;

	return x[0] == y[0] && x[1] == y[1];
}

static __always_inline int pw_addr_is_zero(const struct pw_addr *a)
{
	const __u64 *x = (const __u64 *)a->b;

	return !(x[0] | x[1]);
}

static __always_inline int pw_addr_is_loopback(const struct pw_addr *a)
{
	const __u64 *x = (const __u64 *)a->b;

	return !x[0] && (x[1] == bpf_cpu_to_be64(1) || (bpf_be64_to_cpu(x[1]) >> 24) == 0xffff7f);
}

static __always_inline int pw_addr_is_v4(const struct pw_addr *a)
{
	return pw_addr_word(a, 0) == 0 && pw_addr_word(a, 1) == 0 &&
	       pw_addr_word(a, 2) == bpf_htonl(0xffff);
}

/* 224.0.0.0/4, 255.255.255.255, ff00::/8 */
static __always_inline int pw_addr_is_multicast(const struct pw_addr *a)
{
	if (pw_addr_is_v4(a))
		return a->b[12] >= 224;
	return a->b[0] == 0xff;
}

/* Addresses that no router forwards: fe80::/10, ff01::/16, ff02::/16. */
static __always_inline int pw_addr_is_link(const struct pw_addr *a)
{
	if (a->b[0] == 0xff)
		return (a->b[1] & 0xf) <= 2;
	return a->b[0] == 0xfe && (a->b[1] & 0xc0) == 0x80;
}

/* No host may send from these: 0/8, 127/8, multicast, ::, ::1. */
static __always_inline int pw_addr_is_bad_source(const struct pw_addr *a)
{
	if (pw_addr_is_v4(a))
		return a->b[12] == 0 || a->b[12] == 127 || a->b[12] >= 224;
	if (a->b[0] == 0xff)
		return 1;
	return pw_addr_word(a, 0) == 0 && pw_addr_word(a, 1) == 0 && pw_addr_word(a, 2) == 0 &&
	       bpf_ntohl(pw_addr_word(a, 3)) <= 1;
}

/* Does a TCP segment without extension headers stand linear at base? */
static __always_inline int pw_tcp_linear(void *data, void *end, __u32 base)
{
	struct ethhdr *eth = data + base;
	struct ipv6hdr *ip6 = (void *)(eth + 1);
	struct iphdr *ip = (void *)(eth + 1);

	if ((void *)(ip + 1) > end)
		return 0;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return ip->protocol == IPPROTO_TCP &&
		       (void *)ip + ip->ihl * 4 + sizeof(struct tcphdr) <= end;
	return eth->h_proto == bpf_htons(ETH_P_IPV6) &&
	       (void *)(ip6 + 1) + sizeof(struct tcphdr) <= end && ip6->nexthdr == IPPROTO_TCP;
}

/* The same for one under a VXLAN header of ours. */
static __always_inline int pw_vxlan_tcp_linear(void *data, void *end)
{
	struct iphdr *ip = data + PW_HDR_IP;
	struct udphdr *udp = data + PW_HDR_UDP;
	struct ethhdr *eth = data;

	return data + PW_HDR_INNER <= end && eth->h_proto == bpf_htons(ETH_P_IP) &&
	       ip->version == 4 && ip->ihl == 5 && ip->protocol == IPPROTO_UDP &&
	       udp->dest == bpf_htons(cfg_vxlan_port) && pw_tcp_linear(data, end, PW_HDR_INNER);
}

/* The same for one under an IPv4 header. */
static __always_inline int pw_ipip_tcp_linear(void *data, void *end)
{
	struct iphdr *ip = data + PW_HDR_IP, *inner = ip + 1;
	struct ethhdr *eth = data;

	return (void *)(inner + 1) <= end && eth->h_proto == bpf_htons(ETH_P_IP) &&
	       ip->version == 4 && ip->ihl == 5 && ip->protocol == IPPROTO_IPIP &&
	       inner->protocol == IPPROTO_TCP &&
	       (void *)inner + inner->ihl * 4 + sizeof(struct tcphdr) <= end;
}

/*
 * Makes the headers linear, so that they can be read and written in place.
 * A TCP segment's payload lives in fragments, and the kernel shares it with
 * the retransmit queue: to pull some of it would copy the packet's head. Its
 * headers are where they are needed already.
 */
static __always_inline void pw_pull(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u32 want = skb->len < PW_PULL ? skb->len : PW_PULL;

	if (end - data >= want || pw_tcp_linear(data, end, 0) || pw_vxlan_tcp_linear(data, end) ||
	    pw_ipip_tcp_linear(data, end))
		return;
	bpf_skb_pull_data(skb, want);
}

/* whole: not a first fragment, which has not all of its datagram. */
static __always_inline int pw_parse_ports(struct __sk_buff *skb, struct pw_pkt *p, __u32 l4_len,
					  int whole)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	void *h = data + (p->l4 & 0xff);

	if (p->key.proto == IPPROTO_TCP) {
		struct tcphdr *tcp = h;

		if ((void *)(tcp + 1) > end || tcp->doff < 5 || tcp->doff * 4U > l4_len)
			return PW_DROP_MALFORMED;
		p->headers += tcp->doff * 4;
		p->tcp_flags = ((__u8 *)tcp)[13];
		p->key.sport = bpf_ntohs(tcp->source);
		p->key.dport = bpf_ntohs(tcp->dest);
	} else if (p->key.proto == IPPROTO_UDP) {
		struct udphdr *udp = h;

		if ((void *)(udp + 1) > end || l4_len < sizeof(*udp))
			return PW_DROP_MALFORMED;
		/* Under GSO 0 stands for more than 64 KiB. */
		if (!skb->gso_size &&
		    (bpf_ntohs(udp->len) < sizeof(*udp) || (whole && bpf_ntohs(udp->len) > l4_len)))
			return PW_DROP_MALFORMED;
		p->headers += sizeof(*udp);
		p->key.sport = bpf_ntohs(udp->source);
		p->key.dport = bpf_ntohs(udp->dest);
	} else if (p->key.proto == PW_PROTO_SCTP) {
		__be16 *ports = h;

		/* Common header: ports, tag, checksum. */
		if (h + 12 > end || l4_len < 12)
			return PW_DROP_MALFORMED;
		p->key.sport = bpf_ntohs(ports[0]);
		p->key.dport = bpf_ntohs(ports[1]);
	}
	p->kind = PW_KIND_FLOW;
	return 0;
}

/* RFC 792 and RFC 4443: which messages are errors, which echo. */
static __always_inline int pw_parse_icmp(struct __sk_buff *skb, struct pw_pkt *p, __u32 l4_len)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct pw_icmphdr *icmp = data + (p->l4 & 0xff);
	__u8 type;

	if ((void *)(icmp + 1) > end || l4_len < sizeof(*icmp))
		return PW_DROP_MALFORMED;
	type = icmp->type;
	p->kind = PW_KIND_FLOW;
	if (p->key.proto == IPPROTO_ICMP) {
		if (type == PW_ICMP_ECHO)
			p->key.sport = bpf_ntohs(icmp->id);
		else if (type == PW_ICMP_ECHO_REPLY)
			p->key.dport = bpf_ntohs(icmp->id);
		else if (type == PW_ICMP_UNREACHABLE || type == PW_ICMP_QUENCH ||
			 type == PW_ICMP_TIME_EXCEEDED || type == PW_ICMP_PARAMETER)
			p->kind = PW_KIND_ICMP_ERROR;
		return 0;
	}
	if (type == PW_ICMP6_ECHO)
		p->key.sport = bpf_ntohs(icmp->id);
	else if (type == PW_ICMP6_ECHO_REPLY)
		p->key.dport = bpf_ntohs(icmp->id);
	else if (type < PW_ICMP6_INFO)
		p->kind = PW_KIND_ICMP_ERROR;
	else if (((type >= PW_ICMP6_LINK_FIRST && type <= PW_ICMP6_LINK_LAST) ||
		  type == PW_ICMP6_MLD2) &&
		 pw_addr_is_link(&p->key.dst))
		/*
		 * MLD (RFC 2710, 3810) and neighbour discovery (RFC 4861), on
		 * the link. To a routed address they are packets like any
		 * other: the host would forward them.
		 */
		p->kind = PW_KIND_LINK;
	return 0;
}

static __always_inline int pw_parse_l4(struct __sk_buff *skb, struct pw_pkt *p, __u32 l4_len,
				       int whole)
{
	if (p->key.proto == IPPROTO_ICMP || p->key.proto == IPPROTO_ICMPV6) {
		/* One family's ICMP inside the other is not a protocol. */
		if ((p->key.proto == IPPROTO_ICMPV6) != p->v6)
			return PW_DROP_MALFORMED;
		return pw_parse_icmp(skb, p, l4_len);
	}
	return pw_parse_ports(skb, p, l4_len, whole);
}

static __always_inline int pw_parse_v4(struct __sk_buff *skb, struct pw_pkt *p, __u32 base)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + base + ETH_HLEN;
	__u32 have = skb->len - base - ETH_HLEN, total, header;

	if ((void *)(ip + 1) > end || ip->version != 4)
		return PW_DROP_MALFORMED;
	/* Who it is for is known even when the rest makes no sense. */
	pw_addr_v4(&p->key.src, ip->saddr);
	pw_addr_v4(&p->key.dst, ip->daddr);
	header = ip->ihl * 4;
	total = bpf_ntohs(ip->tot_len);
	if (!total && skb->gso_size) /* BIG TCP */
		total = have;
	if (header < sizeof(*ip) || total < header || total > have)
		return PW_DROP_MALFORMED;
	p->key.proto = ip->protocol;
	p->ttl = ip->ttl;
	p->ecn = ip->tos & 3;
	p->l3 = base + ETH_HLEN;
	p->l4 = base + ETH_HLEN + header;
	p->headers = header;
	p->kind = PW_KIND_NONE;
	if (ip->frag_off & bpf_htons(PW_IP_MF_OFFSET))
		return PW_DROP_FRAGMENT;
	return pw_parse_l4(skb, p, total - header, 1);
}

static __always_inline int pw_is_extension(__u8 next)
{
	return next == PW_NEXTHDR_HOP || next == PW_NEXTHDR_ROUTING || next == PW_NEXTHDR_DEST ||
	       next == PW_NEXTHDR_AUTH || next == PW_NEXTHDR_FRAGMENT;
}

/*
 * Walks the extension headers (RFC 8200 4), the first of which is next at off;
 * bounded, and never past what was made linear. Returns the offset behind them
 * << 8 and what stands there, or -1 - the reason. A function that is verified
 * by itself, not with every way that leads here.
 */
__noinline int pw_walk_v6(struct __sk_buff *skb, __u32 next, __u32 off)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	int i;

	for (i = 0; i < PW_EXT_HEADERS_MAX; i++) {
		__u8 *h = data + (off & 0xff);

		if (h + 8 > (__u8 *)end)
			return -1 - PW_DROP_MALFORMED;
		if (next == PW_NEXTHDR_FRAGMENT) {
			/* An atomic fragment (RFC 6946) is a whole packet. */
			if (*(__be16 *)(h + 2) & bpf_htons(0xfff9))
				return -1 - PW_DROP_FRAGMENT;
			off += 8;
		} else if (next == PW_NEXTHDR_AUTH) {
			off += (h[1] + 2) * 4;
		} else {
			off += (h[1] + 1) * 8;
		}
		next = h[0];
		if (off > PW_PULL - 2 * sizeof(struct tcphdr))
			return -1 - PW_DROP_EXT_HEADERS;
		if (!pw_is_extension(next))
			return off << 8 | next;
	}
	return -1 - PW_DROP_EXT_HEADERS;
}

static __always_inline int pw_parse_v6(struct __sk_buff *skb, struct pw_pkt *p, __u32 base)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u32 payload_off = base + ETH_HLEN + sizeof(struct ipv6hdr);
	struct ipv6hdr *ip = data + base + ETH_HLEN;
	__u32 have = skb->len - payload_off, payload, off = payload_off;
	__u8 next;
	int walked;

	p->v6 = 1;
	if ((void *)(ip + 1) > end || ip->version != 6)
		return PW_DROP_MALFORMED;
	pw_addr_copy(&p->key.src, &ip->saddr);
	pw_addr_copy(&p->key.dst, &ip->daddr);
	/* Such a packet would be taken for IPv4 by every map (RFC 4942 2.2). */
	if (pw_addr_is_v4(&p->key.src) || pw_addr_is_v4(&p->key.dst))
		return PW_DROP_V4_MAPPED;
	payload = bpf_ntohs(ip->payload_len);
	if (!payload && skb->gso_size) /* BIG TCP, RFC 2675 */
		payload = have;
	if (payload > have)
		return PW_DROP_MALFORMED;
	p->ttl = ip->hop_limit;
	p->ecn = (ip->flow_lbl[0] >> 4) & 3;
	p->l3 = base + ETH_HLEN;
	p->kind = PW_KIND_NONE;
	next = ip->nexthdr;
	if (pw_is_extension(next)) {
		walked = pw_walk_v6(skb, next, off);
		if (walked < 0)
			return -1 - walked;
		next = walked;
		off = walked >> 8;
	}
	p->key.proto = next;
	p->l4 = off;
	p->headers = off - base - ETH_HLEN;
	if (off - payload_off > payload)
		return PW_DROP_MALFORMED;
	return pw_parse_l4(skb, p, payload - (off - payload_off), 1);
}

/*
 * Fills p from the frame that starts at base (0, or behind a tunnel header).
 * Returns 0, or the reason why the packet can't be followed; key.src and
 * key.dst are set as far as they were readable (zero if not). The caller
 * decides what an unreadable packet means at its hook.
 */
static __always_inline int pw_parse_at(struct __sk_buff *skb, struct pw_pkt *p, __u32 base)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data + base;

	if ((void *)(eth + 1) > end)
		return PW_DROP_MALFORMED;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return pw_parse_v4(skb, p, base);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return pw_parse_v6(skb, p, base);
	if (eth->h_proto == bpf_htons(ETH_P_ARP)) {
		p->kind = PW_KIND_LINK;
		return 0;
	}
	return PW_DROP_UNKNOWN_L3;
}

static __always_inline int pw_parse(struct __sk_buff *skb, struct pw_pkt *p)
{
	pw_pull(skb);
	if (skb->vlan_present)
		return PW_DROP_UNKNOWN_L3;
	return pw_parse_at(skb, p, 0);
}

/*
 * A packet that the host's stack sends. "From the host" means no ingress
 * device, never an address.
 */
static __always_inline int pw_parse_from_stack(struct __sk_buff *skb, struct pw_pkt *p)
{
	int err = pw_parse(skb, p);

	p->from.kind = skb->ingress_ifindex ? PW_PLACE_WIRE : PW_PLACE_HOST;
	p->from.id = skb->ingress_ifindex;
	return err;
}

/* How long the packet says that it is, IP header included. Verified by itself. */
__noinline __u32 pw_packet_len(struct __sk_buff *skb, const struct pw_pkt *p)
{
	__u32 have = skb->len - ETH_HLEN, len;
	__be16 field;

	if (!p)
		return 0;
	if (bpf_skb_load_bytes(skb,
			       ETH_HLEN + (p->v6 ? offsetof(struct ipv6hdr, payload_len)
						 : offsetof(struct iphdr, tot_len)),
			       &field, sizeof(field)))
		return 0;
	len = bpf_ntohs(field);
	if (!len && skb->gso_size) /* BIG TCP */
		return have;
	if (p->v6)
		len += sizeof(struct ipv6hdr);
	return len < have ? len : have;
}

/* The IP packet's length, or that of its segments. */
static __always_inline __u32 pw_size(const struct __sk_buff *skb, const struct pw_pkt *p)
{
	return skb->gso_size ? skb->gso_size + p->headers : skb->len - ETH_HLEN;
}

#endif
