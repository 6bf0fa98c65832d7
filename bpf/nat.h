/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Writes a flow's translation and the router's TTL into the packet.
 * Checksums are updated by difference (RFC 1624), so what was right stays
 * right and what was wrong stays wrong, with transmit offload on or off.
 */
#ifndef PW_NAT_H
#define PW_NAT_H

#include "parse.h"
#include "sctp.h"

static __always_inline __u32 pw_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* Ones' complement difference between two addresses, 16 bits. */
static __always_inline __u64 pw_addr_diff(const struct pw_addr *from, const struct pw_addr *to)
{
	__u64 sum = 0;
	int i;

#pragma unroll
	for (i = 0; i < 4; i++) {
		sum += (__u32)~pw_addr_word(from, i);
		sum += pw_addr_word(to, i);
	}
	return sum;
}

/* The addresses, TTL and the IPv4 header checksum. dec: routers take one. */
static __always_inline int pw_write_l3(struct __sk_buff *skb, struct pw_pkt *p,
				       const struct pw_flow *f, __u32 diff, int dec)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (p->v6) {
		struct ipv6hdr *ip = data + ETH_HLEN;

		if ((void *)(ip + 1) > end)
			return PW_DROP_HELPER;
		if (f->flags & PW_F_XLATE) {
			__builtin_memcpy(&ip->saddr, f->src.b, 16);
			__builtin_memcpy(&ip->daddr, f->dst.b, 16);
		}
		/* Nothing in the header makes up for it in a CHECKSUM_COMPLETE. */
		if (dec) {
			ip->hop_limit -= 1;
			bpf_csum_update(skb, (__u16)~bpf_htons(0x0001));
		}
	} else {
		struct iphdr *ip = data + ETH_HLEN;
		__u64 sum;

		if ((void *)(ip + 1) > end)
			return PW_DROP_HELPER;
		/* ~check is the sum over the header; TTL is the high byte. */
		sum = (__u16)~ip->check;
		if (f->flags & PW_F_XLATE) {
			ip->saddr = pw_addr_word(&f->src, 3);
			ip->daddr = pw_addr_word(&f->dst, 3);
			sum += diff;
		}
		if (dec) {
			ip->ttl -= 1;
			sum += (__u16)~bpf_htons(0x0100);
		}
		ip->check = ~pw_fold(sum);
	}
	return 0;
}

/* An echo's identifier; ICMPv6 counts the addresses in its checksum. */
static __always_inline int pw_write_icmp(struct __sk_buff *skb, struct pw_pkt *p,
					 const struct pw_flow *f, __u32 diff)
{
	__be16 old = bpf_htons(p->key.sport ?: p->key.dport);
	__be16 id = bpf_htons(p->key.sport ? f->sport : f->dport);
	__u32 off = p->l4 + offsetof(struct pw_icmphdr, check);

	if (p->v6 && diff != 0xffff) {
		if (bpf_l4_csum_replace(skb, off, 0, diff, BPF_F_PSEUDO_HDR))
			return PW_DROP_HELPER;
		/* As in pw_write_l4. */
		bpf_csum_update(skb, diff);
	}
	if (old == id)
		return 0;
	if (bpf_l4_csum_replace(skb, off, old, id, 2) ||
	    bpf_skb_store_bytes(skb, p->l4 + offsetof(struct pw_icmphdr, id), &id, sizeof(id), 0))
		return PW_DROP_HELPER;
	return 0;
}

/*
 * Ports and the transport checksum. bpf_l4_csum_replace knows whether the
 * checksum is final or still partial; a raw store would not.
 */
static __always_inline int pw_write_l4(struct __sk_buff *skb, struct pw_pkt *p,
				       const struct pw_flow *f, __u32 diff)
{
	__u16 sport = p->key.sport, dport = p->key.dport;
	__u64 flags = 0;
	__u32 off = p->l4;
	void *data, *end;
	__be16 *ports;

	if (p->key.proto == IPPROTO_TCP) {
		off += offsetof(struct tcphdr, check);
	} else if (p->key.proto == IPPROTO_UDP) {
		off += offsetof(struct udphdr, check);
		flags = BPF_F_MARK_MANGLED_0;
	} else if (p->key.proto == IPPROTO_ICMP || p->key.proto == IPPROTO_ICMPV6) {
		return pw_write_icmp(skb, p, f, diff);
	} else {
		/* Where no checksum has the addresses, CHECKSUM_COMPLETE has. */
		if (p->v6)
			bpf_csum_update(skb, diff);
		return p->key.proto == PW_PROTO_SCTP ? pw_write_sctp(skb, p, f) : 0;
	}
	if (diff != 0xffff && bpf_l4_csum_replace(skb, off, 0, diff, flags | BPF_F_PSEUDO_HDR))
		return PW_DROP_HELPER;
	/*
	 * That also took the difference out of a CHECKSUM_COMPLETE, which is
	 * right for IPv4 alone: in an IPv6 packet addresses and checksum
	 * cancel. BPF_F_IPV6 would say so since 6.16; older kernels refuse
	 * it, so it is put back.
	 */
	if (diff != 0xffff && p->v6)
		bpf_csum_update(skb, diff);
	if (sport == f->sport && dport == f->dport)
		return 0;
	if (sport != f->sport &&
	    bpf_l4_csum_replace(skb, off, bpf_htons(sport), bpf_htons(f->sport), flags | 2))
		return PW_DROP_HELPER;
	if (dport != f->dport &&
	    bpf_l4_csum_replace(skb, off, bpf_htons(dport), bpf_htons(f->dport), flags | 2))
		return PW_DROP_HELPER;
	/* Where they were read from. */
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	ports = data + (p->l4 & 0xff);
	if ((void *)(ports + 2) > end)
		return PW_DROP_HELPER;
	ports[0] = bpf_htons(f->sport);
	ports[1] = bpf_htons(f->dport);
	return 0;
}

/*
 * Brings the packet into the form its flow says. Returns 0 or a reason. later:
 * a fragment without the transport header. What its datagram's addresses
 * change there is made up for in the first.
 */
static __always_inline int pw_rewrite(struct __sk_buff *skb, struct pw_pkt *p,
				      const struct pw_flow *f, int dec, int later)
{
	__u32 diff = 0;
	int err;

	if (f->flags & PW_F_XLATE)
		diff = pw_fold(pw_addr_diff(&p->key.src, &f->src) +
			       pw_addr_diff(&p->key.dst, &f->dst));
	err = pw_write_l3(skb, p, f, diff, dec);
	if (err || !(f->flags & PW_F_XLATE))
		return err;
	if (later) {
		/* As in pw_write_l4. */
		if (p->v6)
			bpf_csum_update(skb, diff);
		return 0;
	}
	return pw_write_l4(skb, p, f, diff);
}

#endif
