/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP errors belong to the flow of the packet they carry (RFC 792, RFC
 * 4443 3): they pass where that flow passes, whatever the policies say of
 * ICMP, and nothing else does. What they quote of a translated flow is
 * translated back, so that it is the packet that its sender knows.
 */
#ifndef PW_ICMP_H
#define PW_ICMP_H

#include "decide.h"
#include "filtered.h"
#include "flow.h"
#include "nat.h"
#include "tunnel.h"

/*
 * The embedded packet's tuple, turned round: the direction the error takes.
 * What a frame has behind the error's own end is not quoted.
 */
__noinline int pw_embedded(struct __sk_buff *skb, const struct pw_pkt *p, struct pw_flow_key *k)
{
	__be16 ports[2] = {};
	__u8 icmp[8];
	__u32 off, end, v6;

	if (!p || !k)
		return PW_DROP_HELPER;
	v6 = p->v6;
	off = p->l4 + sizeof(struct pw_icmphdr);
	end = ETH_HLEN + pw_packet_len(skb, p);
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
		off += sizeof(ports);
		k->dport = bpf_ntohs(ports[0]);
		k->sport = bpf_ntohs(ports[1]);
	} else if (k->proto == IPPROTO_ICMP || k->proto == IPPROTO_ICMPV6) {
		if (bpf_skb_load_bytes(skb, off, icmp, sizeof(icmp)))
			return PW_DROP_MALFORMED;
		off += sizeof(icmp);
		/* Turned round: the request's identifier is the reply's dport. */
		if (icmp[0] == (v6 ? PW_ICMP6_ECHO : PW_ICMP_ECHO))
			k->dport = (icmp[4] << 8) | icmp[5];
		else if (icmp[0] == (v6 ? PW_ICMP6_ECHO_REPLY : PW_ICMP_ECHO_REPLY))
			k->sport = (icmp[4] << 8) | icmp[5];
	}
	return off > end ? PW_DROP_MALFORMED : 0;
}

/*
 * At a device that is the host's as well: is the error about a packet that we
 * have translated, or that the host sent or received by our doing? The rest
 * is the stack's.
 */
__noinline int pw_error_is_ours(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *f;

	if (!p || !s)
		return 0;
	if (pw_embedded(skb, p, &s->embedded) || !pw_addr_eq(&s->embedded.dst, &p->key.dst))
		return 0;
	f = pw_flow_find(&s->embedded);
	if (!f)
		return 0;
	if (p->from.kind == PW_PLACE_HOST)
		return f->from.kind == PW_PLACE_HOST;
	return f->flags & PW_F_XLATE || f->frame;
}

/* A router cannot have less (RFC 791; the kernel's limit), nor IPv6. */
#define PW_OUTER_MIN_V4 552
#define PW_OUTER_MIN_V6 1280

/* The MTU that an error tells of; 0 = it is about something else. */
static __always_inline __u32 pw_told_mtu(struct __sk_buff *skb, const struct pw_pkt *p)
{
	struct pw_icmphdr icmp;
	__u32 word, mtu;

	if (bpf_skb_load_bytes(skb, p->l4, &icmp, sizeof(icmp)) ||
	    bpf_skb_load_bytes(skb, p->l4 + offsetof(struct pw_icmphdr, id), &word, sizeof(word)))
		return 0;
	if (p->v6) {
		mtu = icmp.type == PW_ICMP6_TOO_BIG ? bpf_ntohl(word) : 0;
		return mtu && mtu < PW_OUTER_MIN_V6 ? PW_OUTER_MIN_V6 : mtu;
	}
	if (icmp.type != PW_ICMP_UNREACHABLE || icmp.code != PW_ICMP_FRAG_NEEDED)
		return 0;
	mtu = bpf_ntohl(word) & 0xffff;
	return mtu && mtu < PW_OUTER_MIN_V4 ? PW_OUTER_MIN_V4 : mtu;
}

/* Is what the error quotes at off, with tuple k, VXLAN of our network? */
static __always_inline int pw_quotes_vxlan(struct __sk_buff *skb, const struct pw_pkt *p,
					   const struct pw_flow_key *k, __u32 off)
{
	__be32 vxlan[2];
	__u8 first;

	if (k->proto != IPPROTO_UDP || k->sport != cfg_vxlan_port ||
	    bpf_skb_load_bytes(skb, off, &first, sizeof(first)))
		return 0;
	off += (p->v6 ? sizeof(struct ipv6hdr) : (first & 0xf) * 4) + sizeof(struct udphdr);
	return !bpf_skb_load_bytes(skb, off, vxlan, sizeof(vxlan)) &&
	       vxlan[0] == bpf_htonl(PW_VXLAN_FLAGS) && vxlan[1] == bpf_htonl(cfg_vni << 8);
}

/*
 * A router says that a packet of the tunnel itself is too big: from now on
 * whoever sends more to that node is told so (see pw_over_limit). The quote
 * must be of a packet that this node may have sent. The kernel hears it, too,
 * for what its device sends; the agent raises the MTU again after a while.
 */
__noinline int pw_learn_mtu(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	__u32 *id, mtu, head, off;
	struct pw_flow_key *k;
	struct pw_node *node;

	if (!p || !s)
		return 0;
	mtu = pw_told_mtu(skb, p);
	off = p->l4 + sizeof(struct pw_icmphdr);
	k = &s->embedded;
	if (!mtu || pw_embedded(skb, p, k) || !pw_is_tunnel_end(&k->dst) ||
	    !pw_addr_eq(&k->dst, &p->key.dst))
		return 0;
	id = bpf_map_lookup_elem(&pw_node_ids, &k->src);
	if (!id)
		return 0;
	node = bpf_map_lookup_elem(&pw_nodes, id);
	if (!node || !(k->proto == IPPROTO_IPIP ? node->flags & PW_NODE_IPIP
						: pw_quotes_vxlan(skb, p, k, off)))
		return 0;
	head = p->v6 ? PW_ENCAP6_LEN : PW_ENCAP_LEN;
	if (!node->mtu || mtu - head >= node->mtu)
		return 0;
	node->mtu = mtu - head;
	pw_count(PW_PMTU_LEARNED, p->hook, p->v6, skb->len);
	return 0;
}

/* What a 16-bit field's change adds to a sum. */
static __always_inline __u32 pw_field_diff(__be16 from, __be16 to)
{
	return (__u16)~from + to;
}

/*
 * The quote's ports or identifier, and its checksum if the quote goes that
 * far. *sum is what the whole quote's change adds up to; diff that of its
 * addresses, which most checksums cover. SCTP's CRC is over more than what
 * is quoted, and nobody can check it.
 */
static __always_inline int pw_quote_l4(struct __sk_buff *skb, const struct pw_pkt *p,
				       const struct pw_scratch *s, __u32 l4, __u32 diff, __u64 *sum)
{
	const struct pw_flow_key *k = &s->embedded;
	const struct pw_flow *f = &s->fwd;
	__u32 end = ETH_HLEN + pw_packet_len(skb, p), at;
	int udp = k->proto == IPPROTO_UDP;
	__u64 change = 0;
	__be16 to[2], check, now;

	if (pw_has_ports(k->proto)) {
		at = l4 + (udp ? offsetof(struct udphdr, check) : offsetof(struct tcphdr, check));
		to[0] = bpf_htons(f->dport);
		to[1] = bpf_htons(f->sport);
		change = pw_field_diff(bpf_htons(k->dport), to[0]) +
			 pw_field_diff(bpf_htons(k->sport), to[1]);
		if (bpf_skb_store_bytes(skb, l4, to, sizeof(to), 0))
			return PW_DROP_HELPER;
	} else if (k->proto == IPPROTO_ICMP || k->proto == IPPROTO_ICMPV6) {
		at = l4 + offsetof(struct pw_icmphdr, check);
		to[0] = bpf_htons(k->dport ? f->dport : f->sport);
		if (k->dport | k->sport) {
			change = pw_field_diff(bpf_htons(k->dport ?: k->sport), to[0]);
			if (bpf_skb_store_bytes(skb, l4 + offsetof(struct pw_icmphdr, id), to,
						sizeof(to[0]), 0))
				return PW_DROP_HELPER;
		}
	} else {
		return 0;
	}
	*sum += change;
	if (k->proto == PW_PROTO_SCTP || at + sizeof(check) > end ||
	    bpf_skb_load_bytes(skb, at, &check, sizeof(check)) || (udp && !check))
		return 0;
	if (k->proto != IPPROTO_ICMP)
		change += diff;
	now = ~pw_fold((__u16)~check + change);
	if (udp && !now)
		now = 0xffff;
	*sum += pw_field_diff(check, now);
	return bpf_skb_store_bytes(skb, at, &now, sizeof(now), 0) ? PW_DROP_HELPER : 0;
}

/*
 * Writes into the quote what its sender sent, or its receiver would have
 * seen: the packet of the other direction, before s->fwd's translation. Every
 * checksum, the error's too, is brought up to date by difference.
 */
__noinline int pw_write_quote(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	__u32 off, diff, l4;
	__be16 check, now;
	__be32 v4[2];
	__u64 sum;
	__u8 first;
	int err;

	if (!p || !s)
		return PW_DROP_HELPER;
	off = p->l4 + sizeof(struct pw_icmphdr);
	diff = pw_fold(pw_addr_diff(&s->embedded.dst, &s->fwd.dst) +
		       pw_addr_diff(&s->embedded.src, &s->fwd.src));
	sum = diff;
	if (p->v6) {
		l4 = off + sizeof(struct ipv6hdr);
		if (bpf_skb_store_bytes(skb, off + offsetof(struct ipv6hdr, saddr), s->fwd.dst.b,
					16, 0) ||
		    bpf_skb_store_bytes(skb, off + offsetof(struct ipv6hdr, daddr), s->fwd.src.b,
					16, 0))
			return PW_DROP_HELPER;
	} else {
		v4[0] = pw_addr_word(&s->fwd.dst, 3);
		v4[1] = pw_addr_word(&s->fwd.src, 3);
		if (bpf_skb_load_bytes(skb, off, &first, sizeof(first)) ||
		    bpf_skb_load_bytes(skb, off + offsetof(struct iphdr, check), &check,
				       sizeof(check)))
			return PW_DROP_HELPER;
		l4 = off + (first & 0xf) * 4;
		now = ~pw_fold((__u64)(__u16)~check + diff);
		sum += pw_field_diff(check, now);
		if (bpf_skb_store_bytes(skb, off + offsetof(struct iphdr, check), &now, sizeof(now),
					0) ||
		    bpf_skb_store_bytes(skb, off + offsetof(struct iphdr, saddr), v4, sizeof(v4),
					0))
			return PW_DROP_HELPER;
	}
	err = pw_quote_l4(skb, p, s, l4, diff, &sum);
	if (err)
		return err;
	/* A CHECKSUM_COMPLETE stays as it is: quote and checksum cancel. */
	return bpf_l4_csum_replace(skb, p->l4 + offsetof(struct pw_icmphdr, check), 0, pw_fold(sum),
				   0)
		       ? PW_DROP_HELPER
		       : 0;
}

/*
 * Who says it? The flow's own end, under the address that it has there. A
 * router on the way keeps its name towards a pod of this node; elsewhere
 * nobody would take it, and it speaks for the end that it hides.
 */
static __always_inline void pw_error_source(const struct pw_pkt *p, struct pw_scratch *s)
{
	if (pw_addr_eq(&s->fwd.src, &s->embedded.src) ||
	    (s->fwd.to.kind == PW_PLACE_POD && !pw_addr_eq(&p->key.src, &s->embedded.src)))
		s->fwd.src = p->key.src;
}

/*
 * Finds the flow an error is about, translates the quote, and leaves in s->fwd
 * what is to be done with the error itself. Returns 0 or a reason.
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
	err = pw_embedded(skb, p, &s->embedded);
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
	s->fwd = *f;
	/* Recycled meanwhile, or decided from what has changed since: the
	 * flow's next packet tells anew. */
	if (s->fwd.key_hash != pw_key_hash(&s->embedded) || !pw_fresh(&s->fwd))
		return PW_DROP_ICMP_UNRELATED;
	/*
	 * Only from where the flow's own packets come, or from this node, or
	 * about answers that went out here.
	 */
	if (p->from.kind != PW_PLACE_HOST && !pw_same_place(&s->fwd.from, &p->from) &&
	    !(s->fwd.entry && p->from.kind == PW_PLACE_WIRE))
		return PW_DROP_ICMP_UNRELATED;
	if (s->fwd.verdict != PW_VERDICT_ALLOW)
		return s->fwd.reason ?: PW_DROP_HELPER;
	/* What is left to filters comes again, and is translated then. */
	if (!(s->fwd.flags & PW_F_XLATE) || pw_leaves(p, &s->fwd))
		return 0;
	err = pw_write_quote(skb, p);
	if (err)
		return err;
	pw_error_source(p, s);
	/* The error itself has neither ports nor an identifier. */
	s->fwd.sport = s->fwd.dport = 0;
	return 0;
}

#endif
