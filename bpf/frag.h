/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments (RFC 791, RFC 8200 4.5). The first has the ports and is a packet
 * like any other, which may begin a flow; what it says is kept for the others,
 * which only follow. One that is ahead of its first goes up to the kernel, with
 * all of its datagram: reassembled before it is routed, and cut again when it
 * is sent on, it comes back in order at the hook of the device that it leaves
 * by. There it is judged, as from where it came.
 */
#ifndef PW_FRAG_H
#define PW_FRAG_H

#include "decide.h"
#include "follow.h"

#define PW_IP_MF 0x2000
#define PW_IP_OFFSET 0x1fff
#define PW_FRAG_LEN_MAX 0xffff

/* Of this fragment: offset and length of its part of the datagram. */
struct pw_fragment {
	__u32 id;
	__u32 off;
	__u32 len;
	__u32 begin; /* where that part stands in the frame */
	__u32 more;
	__u32 next; /* IPv6: what the fragment header says that follows */
};

static __always_inline int pw_frag_v4(struct __sk_buff *skb, struct pw_pkt *p,
				      struct pw_fragment *fr)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	__u32 header;

	if ((void *)(ip + 1) > end)
		return PW_DROP_MALFORMED;
	header = ip->ihl * 4;
	fr->id = bpf_ntohs(ip->id);
	fr->off = (bpf_ntohs(ip->frag_off) & PW_IP_OFFSET) * 8;
	fr->more = bpf_ntohs(ip->frag_off) & PW_IP_MF;
	fr->len = bpf_ntohs(ip->tot_len) - header;
	fr->begin = ETH_HLEN + header;
	p->key.proto = ip->protocol;
	if (header + fr->off + fr->len > PW_FRAG_LEN_MAX)
		return PW_DROP_MALFORMED;
	return 0;
}

/* Where the fragment header stands, or -1 - the reason; as pw_walk_v6. */
__noinline int pw_walk_to_fragment(struct __sk_buff *skb, __u32 next)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u32 off = ETH_HLEN + sizeof(struct ipv6hdr);
	int i;

	for (i = 0; i < PW_EXT_HEADERS_MAX; i++) {
		__u8 *h = data + (off & 0xff);

		if (h + 8 > (__u8 *)end || !pw_is_extension(next))
			return -1 - PW_DROP_MALFORMED;
		/* An atomic one is none, see pw_walk_v6. */
		if (next == PW_NEXTHDR_FRAGMENT && *(__be16 *)(h + 2) & bpf_htons(0xfff9))
			return off;
		if (next == PW_NEXTHDR_FRAGMENT)
			off += 8;
		else
			off += next == PW_NEXTHDR_AUTH ? (h[1] + 2) * 4 : (h[1] + 1) * 8;
		next = h[0];
		if (off > PW_PULL - 2 * sizeof(struct tcphdr))
			return -1 - PW_DROP_EXT_HEADERS;
	}
	return -1 - PW_DROP_EXT_HEADERS;
}

static __always_inline int pw_frag_v6(struct __sk_buff *skb, struct pw_pkt *p,
				      struct pw_fragment *fr)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip = data + ETH_HLEN;
	__u32 payload, before;
	__be16 *h;
	int at;

	if ((void *)(ip + 1) > end)
		return PW_DROP_MALFORMED;
	payload = bpf_ntohs(ip->payload_len);
	at = pw_walk_to_fragment(skb, ip->nexthdr);
	if (at < 0)
		return -1 - at;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	h = data + (at & 0xff);
	if ((void *)(h + 4) > end)
		return PW_DROP_MALFORMED;
	before = at + 8 - ETH_HLEN - sizeof(*ip);
	if (before >= payload)
		return PW_DROP_MALFORMED;
	fr->next = *(__u8 *)h;
	fr->off = bpf_ntohs(h[1]) & 0xfff8;
	fr->more = bpf_ntohs(h[1]) & 1;
	fr->id = (__u32)bpf_ntohs(h[2]) << 16 | bpf_ntohs(h[3]);
	fr->len = payload - before;
	fr->begin = at + 8;
	if (before - 8 + fr->off + fr->len > PW_FRAG_LEN_MAX)
		return PW_DROP_MALFORMED;
	return 0;
}

/* 0 or the reason why nobody should put that into a datagram. */
static __always_inline int pw_frag_parse(struct __sk_buff *skb, struct pw_pkt *p,
					 struct pw_fragment *fr)
{
	int err = p->v6 ? pw_frag_v6(skb, p, fr) : pw_frag_v4(skb, p, fr);

	if (err)
		return err;
	return !fr->len || (fr->more && fr->len & 7) ? PW_DROP_MALFORMED : 0;
}

/*
 * The first fragment's transport header, which must be there in whole: there
 * is no other to judge the datagram by (RFC 1858, RFC 7112).
 */
static __always_inline int pw_frag_ports(struct __sk_buff *skb, struct pw_pkt *p,
					 const struct pw_fragment *fr)
{
	__u32 at = fr->begin, next = fr->next;
	int walked;

	if (p->v6 && pw_is_extension(next)) {
		walked = pw_walk_v6(skb, next, at);
		if (walked < 0)
			return -1 - walked;
		next = walked;
		at = walked >> 8;
		if (at - fr->begin > fr->len)
			return PW_DROP_MALFORMED;
	}
	if (p->v6)
		p->key.proto = next;
	p->l4 = at;
	p->headers = at - ETH_HLEN;
	return pw_parse_l4(skb, p, fr->len - (at - fr->begin), 0);
}

/* How much of the datagram the first fragment's headers take. */
static __always_inline __u32 pw_frag_head(const struct pw_pkt *p, const struct pw_fragment *fr)
{
	__u32 before = p->l4 - fr->begin;

	switch (p->key.proto) {
	case IPPROTO_TCP:
		return before + p->headers - (p->l4 - p->l3);
	case PW_PROTO_SCTP:
		return before + 12;
	}
	return before + 8;
}

static __always_inline void pw_frag_name(struct pw_scratch *s, const struct pw_pkt *p, __u32 id)
{
	struct pw_frag_key *k = &s->frag_key;

	__builtin_memset(k, 0, sizeof(*k));
	k->src = p->key.src;
	k->dst = p->key.dst;
	k->id = id;
	k->place = p->from.kind == PW_PLACE_WIRE ? 0 : p->from.id;
	k->kind = p->from.kind;
	k->via = p->key.via;
	k->proto = p->v6 ? 0 : p->key.proto;
	k->hook = p->hook;
}

/* What is known of the datagram, copied into the scratch; 0 = nothing. */
static __always_inline __u32 pw_frag_load(struct pw_scratch *s)
{
	struct pw_frag *f = bpf_map_lookup_elem(&pw_frags, &s->frag_key);

	if (!f)
		return 0;
	s->frag = *f;
	/* Numbers come again: an old datagram says nothing about a new one. */
	return s->frag.seen + cfg_frag_time > pw_now() ? s->frag.state : 0;
}

static __always_inline void pw_frag_store(struct pw_scratch *s, __u32 state)
{
	s->frag.seen = pw_now();
	s->frag.state = state;
	bpf_map_update_elem(&pw_frags, &s->frag_key, &s->frag, BPF_ANY);
}

/*
 * Where a fragment that the host's stack sends comes from. What the host says
 * itself has no ingress device; but neither have fragments that the kernel
 * makes of an IPv6 packet it forwards, unless they are the very ones that came
 * in. They are known by having no socket. Whose source a hook of ours has
 * checked before the kernel had them has the tag, and is where that address
 * is. Returns 0 or a reason.
 */
static __always_inline int pw_frag_origin(struct __sk_buff *skb, struct pw_pkt *p,
					  struct pw_scratch *s)
{
	__u32 in = skb->ingress_ifindex;

	if (pw_is_ingress(p) || (!in && (!p->v6 || skb->sk)))
		return 0;
	p->from.kind = PW_PLACE_WIRE;
	p->from.id = in;
	if (skb->tc_index != PW_FRAG_TAG)
		return in ? 0 : PW_DROP_FRAGMENT;
	pw_resolve(&p->key.src, &s->src);
	if (s->src.ifindex && (!in || in == s->src.ifindex)) {
		p->from.kind = PW_PLACE_POD;
		p->from.id = s->src.ifindex;
	} else if (s->src.node && (!in || in == cfg_overlay_ifindex)) {
		p->from.kind = PW_PLACE_NODE;
		p->from.id = s->src.node;
	}
	return 0;
}

/*
 * May a datagram go up to the kernel's reassembly? Its source must be true
 * here, for later nobody can tell, and its way must lead by a hook of ours that
 * judges it. Returns 0 or a reason.
 */
__noinline int pw_frag_may_rise(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_place from;
	__u32 out;
	int err;

	if (!p || !s)
		return PW_DROP_HELPER;
	pw_resolve(&p->key.src, &s->src);
	from = p->from;
	err = pw_check_source(p, &s->src);
	p->from = from;
	if (err)
		return err;
	if (pw_addr_is_multicast(&p->key.dst))
		return PW_DROP_MULTICAST;
	pw_resolve(&p->key.dst, &s->dst);
	if (!s->dst.ifindex && s->dst.flags & PW_PEER_LOCAL)
		return PW_DROP_NO_ENDPOINT;
	/* Behind the reassembly nobody would know of the frame. */
	if (!cfg_defrag || p->key.via || p->service == PW_CALL_NAMED)
		return PW_DROP_FRAGMENT_BEFORE_FIRST;
	if (s->dst.ifindex)
		return 0;
	if (p->hook != PW_FROM_POD)
		return PW_DROP_FRAGMENT_BEFORE_FIRST;
	/* The host would hear it without a hook between. */
	if (s->dst.flags & PW_PEER_HOST || pw_route(skb, &p->key.src, &p->key.dst, &s->fwd))
		return PW_DROP_FRAGMENT_BEFORE_FIRST;
	out = s->fwd.to.id;
	if (out == cfg_overlay_ifindex || bpf_map_lookup_elem(&pw_dev_addrs, &out))
		return 0;
	return PW_DROP_FRAGMENT_BEFORE_FIRST;
}

#endif
