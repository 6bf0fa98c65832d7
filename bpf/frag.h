/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments (RFC 791, RFC 8200 4.5). The first has the ports and is a packet
 * like any other, which may begin a flow; what it says is kept for the others,
 * which only follow. One that is ahead of its first rises, with all of its
 * datagram: into a network namespace of our own behind podweir.frag, where the
 * kernel reassembles it, routes it back and cuts it again. So it comes back in
 * order (from_frag.c), and goes on as what it was at its hook.
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
	/* No fragment, but what came in one piece out of the reassembly, and unread. */
	if (!fr->off && !fr->more)
		return PW_DROP_MALFORMED;
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

static __always_inline void pw_frag_name(struct pw_scratch *s, const struct pw_pkt *p, __u32 id,
					 int risen)
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
	k->risen = risen;
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

/* Of the far end of podweir.frag, see internal/loader/reassembly.go. */
#define PW_FRAG_PEER_MAC { 0x02, 'p', 'w', 'f', 0, 2 }

/* The source MAC of a frame in the reassembly: 02 'p' TOKEN. */
#define PW_TOKEN_AT 2

/* What stands in the header while it is there: the kernel takes one. */
#define PW_FRAG_TTL 64

/* The TTL, and all that is summed up with it. Returns 0 or a reason. */
static __always_inline int pw_set_ttl(struct __sk_buff *skb, const struct pw_pkt *p, __u8 ttl)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip6 = data + ETH_HLEN;
	struct iphdr *ip = data + ETH_HLEN;

	if (p->v6) {
		if ((void *)(ip6 + 1) > end)
			return PW_DROP_HELPER;
		/* As in pw_write_l3. */
		bpf_csum_update(skb,
				pw_fold((__u32)bpf_htons(ttl) + (__u16)~bpf_htons(ip6->hop_limit)));
		ip6->hop_limit = ttl;
		return 0;
	}
	if ((void *)(ip + 1) > end)
		return PW_DROP_HELPER;
	ip->check = ~pw_fold((__u64)(__u16)~ip->check + bpf_htons(ttl << 8) +
			     (__u16)~bpf_htons(ip->ttl << 8));
	ip->ttl = ttl;
	return 0;
}

/*
 * Where a fragment that the host's stack sends comes from. What the host says
 * itself has no ingress device; but neither have fragments that the kernel
 * makes of an IPv6 packet it forwards, unless they are the very ones that came
 * in. They are known by having no socket. Returns 0 or a reason.
 */
static __always_inline int pw_frag_from(const struct __sk_buff *skb, struct pw_pkt *p)
{
	__u32 in = skb->ingress_ifindex;

	if (pw_is_ingress(p) || (!in && (!p->v6 || skb->sk)))
		return 0;
	p->from.kind = PW_PLACE_WIRE;
	p->from.id = in;
	return in ? 0 : PW_DROP_FRAGMENT;
}

/*
 * May a datagram rise? Its source must be true as far as its place tells, for
 * the kernel asks nobody whose fragments it puts together; and the kernel must
 * route it. Returns 0 or a reason.
 */
__noinline int pw_frag_may_rise(struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_place from;
	__u8 service;
	int err;

	if (!p || !s)
		return PW_DROP_HELPER;
	pw_resolve(&p->key.src, &s->src);
	pw_resolve(&p->key.dst, &s->dst);
	from = p->from;
	service = p->service;
	/* It may be a service that the wire calls, as nodes may, too. */
	if (p->hook == PW_FROM_NETDEV && !s->dst.ifindex)
		p->service = 1;
	err = pw_check_source(p, &s->src);
	p->from = from;
	p->service = service;
	if (err)
		return err;
	if (pw_addr_is_multicast(&p->key.dst))
		return PW_DROP_MULTICAST;
	if (!s->dst.ifindex && s->dst.flags & PW_PEER_LOCAL)
		return PW_DROP_NO_ENDPOINT;
	if (!cfg_frag_ifindex || pw_addr_is_link(&p->key.src) || pw_addr_is_link(&p->key.dst) ||
	    pw_addr_is_bad_source(&p->key.dst))
		return PW_DROP_FRAGMENT_BEFORE_FIRST;
	return 0;
}

/* Writes down what the datagram was here. Returns 0 or a reason. */
static __always_inline int pw_frag_leave_word(struct __sk_buff *skb, const struct pw_pkt *p,
					      struct pw_scratch *s)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct pw_frag_origin *o = &s->origin;
	struct ethhdr *eth = data;
	__u32 token;

	if ((void *)(eth + 1) > end)
		return PW_DROP_HELPER;
	o->key = s->frag_key;
	o->named = s->named;
	o->named_port = s->named_port;
	o->device = skb->ifindex;
	o->service = p->service;
	o->ttl = p->ttl;
	__builtin_memcpy(o->dst_mac, eth->h_dest, 6);
	__builtin_memcpy(o->src_mac, eth->h_source, 6);
	token = s->frag.token;
	return bpf_map_update_elem(&pw_frag_origins, &token, o, BPF_ANY) ? PW_DROP_HELPER : 0;
}

/* Into the reassembly, by the token in s->frag. */
static __always_inline int pw_frag_rise(struct __sk_buff *skb, const struct pw_pkt *p,
					struct pw_scratch *s)
{
	static const __u8 dst[6] = PW_FRAG_PEER_MAC;
	void *data, *end;
	struct ethhdr *eth;
	int err;

	err = pw_frag_leave_word(skb, p, s);
	if (!err)
		err = pw_set_ttl(skb, p, PW_FRAG_TTL);
	if (err)
		return pw_drop(skb, p, err);
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	eth = data;
	if ((void *)(eth + 1) > end)
		return pw_drop(skb, p, PW_DROP_HELPER);
	__builtin_memcpy(eth->h_dest, dst, 6);
	eth->h_source[0] = 0x02;
	eth->h_source[1] = 'p';
	__builtin_memcpy(eth->h_source + PW_TOKEN_AT, &s->frag.token, 4);
	pw_count(PW_FRAGMENT_REASSEMBLY, p->hook, p->v6, skb->len);
	return bpf_redirect(cfg_frag_ifindex, 0);
}

/*
 * Out of the reassembly, and the host's own: to its stack by the device that
 * it came in by, whose hook is told so. Of one IPv6 datagram it finds that
 * out, for the kernel has given it another id.
 */
static __always_inline int pw_frag_return(struct __sk_buff *skb, const struct pw_pkt *p,
					  struct pw_scratch *s)
{
	s->frag.seen = pw_now();
	s->frag.state = PW_FRAG_HOST;
	bpf_map_update_elem(&pw_frags, &s->origin.key, &s->frag, BPF_ANY);
	pw_count(PW_PASS, p->hook, p->v6, skb->len);
	return bpf_redirect(s->origin.device, BPF_F_INGRESS);
}

#endif
