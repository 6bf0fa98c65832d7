/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The birth of a flow: its two entries, races between CPUs, and reply tuples
 * that are taken.
 */
#ifndef PW_CREATE_H
#define PW_CREATE_H

#include "flow.h"

/* How many source ports are tried straight away. */
#define PW_PORT_PROBES 8
/* How many more are looked at, when most are taken, to find a free one. */
#define PW_PORT_SEARCH 4096
/* How often that may be another CPU's by the time that it is reserved. */
#define PW_PORT_FINDS 8
/* How long a destination without a free port is not searched, in nanoseconds. */
#define PW_CROWDED_FOR 100000000ULL
/*
 * How often an insert is tried where another CPU is just removing what was
 * there: that is over in less than a microsecond.
 */
#define PW_INSERT_TRIES 16
#define PW_RESERVE_TRIES 3
#define PW_VACANT_TRIES 256

/* An existing reply entry that belongs to the very flow being created. */
static __always_inline int pw_same_origin(const struct pw_flow *a, const struct pw_flow *b)
{
	return a->flags & PW_F_REPLY && pw_addr_eq(&a->src, &b->src) &&
	       pw_addr_eq(&a->dst, &b->dst) && a->sport == b->sport && a->dport == b->dport &&
	       a->twin_via == b->twin_via;
}

enum pw_insert {
	PW_INSERTED,
	PW_EXISTS, /* a live one is there */
	PW_NO_ROOM,
};

enum pw_entry {
	PW_REV, /* the scratch's rev under rev_key */
	PW_FWD, /* its fwd under fwd_key, which has just been found vacant */
};

struct pw_inserting {
	struct pw_flow_key *key;
	struct pw_flow *val;
	__u32 which;  /* enum pw_entry */
	__s32 result; /* enum pw_insert */
	__u32 waits;  /* for a reply entry that is taken back */
	__u32 pad;
};

static long pw_insert_step(__u32 i, struct pw_inserting *c)
{
	struct pw_flow_key *key = c->key;
	struct pw_flow *old = NULL;

	if (i || c->which != PW_FWD)
		old = pw_flow_peek(key);
	if (old) {
		if (!pw_flow_expired(key, old, PW_SCRATCH_PACKET)) {
			if (c->waits && old->flags & PW_F_REPLY)
				return 0;
			c->result = PW_EXISTS;
			return 1;
		}
		if (!pw_flow_claim(key, old, PW_SCRATCH_PACKET))
			return 0;
	}
	if (pw_new_add(key, c->val))
		return 0;
	if (!bpf_map_lookup_elem(&pw_flows, key)) {
		/*
		 * In a full LRU those that were never looked up go first, before
		 * all that was answered once, as names are: this counts as one.
		 */
		bpf_map_lookup_elem(&pw_flows_new, key);
		c->result = PW_INSERTED;
		return 1;
	}
	pw_new_delete(key);
	return 0;
}

/*
 * Puts one entry into pw_flows_new unless a live one is there, in either
 * table. An outlived one makes room, what is being removed is waited for,
 * and pw_flows is read again after the insert: a promotion may have come
 * between. When both ends open a flow at once, each finds the other's reply
 * entry where its own forward entry would be: one waits, the other gives way,
 * see pw_flow_create. bpf_loop: the verifier follows it through one turn, not all.
 */
__noinline int pw_flow_insert(enum pw_entry which)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_inserting c = { .which = which, .result = -1 };

	if (!s)
		return PW_NO_ROOM;
	c.key = which == PW_FWD ? &s->fwd_key : &s->rev_key;
	c.val = which == PW_FWD ? &s->fwd : &s->rev;
	c.waits = which == PW_FWD && s->fwd.key_hash < s->rev.key_hash;
	bpf_loop(c.waits ? PW_VACANT_TRIES : PW_INSERT_TRIES, pw_insert_step, &c, 0);
	if (c.result >= 0)
		return c.result;
	return bpf_map_lookup_elem(&pw_flows_new, c.key) ? PW_EXISTS : PW_NO_ROOM;
}

/* Has the protocol something in its header that tells flows apart? */
static __always_inline int pw_has_translatable(const struct pw_flow_key *key)
{
	return key->proto == IPPROTO_TCP || key->proto == IPPROTO_UDP ||
	       key->proto == PW_PROTO_SCTP || (key->proto == IPPROTO_ICMP && key->sport) ||
	       (key->proto == IPPROTO_ICMPV6 && key->sport);
}

/*
 * Has the host a socket at local that hears remote? Any but one that waits for
 * whoever comes, or whose connection is over, if it must be connected.
 */
static __always_inline int pw_has_socket(struct __sk_buff *skb, __u8 proto,
					 const struct pw_addr *local, __u16 lport,
					 const struct pw_addr *remote, __u16 rport, int connected)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	__u32 len;
	int i, has;

	/* There is no look-up of SCTP's sockets: nothing is known of them. */
	if (proto != IPPROTO_TCP && proto != IPPROTO_UDP)
		return 0;
	if (pw_addr_is_v4(local)) {
		t.ipv4.saddr = pw_addr_word(remote, 3);
		t.ipv4.daddr = pw_addr_word(local, 3);
		t.ipv4.sport = bpf_htons(rport);
		t.ipv4.dport = bpf_htons(lport);
		len = sizeof(t.ipv4);
	} else {
		for (i = 0; i < 4; i++) {
			t.ipv6.saddr[i] = pw_addr_word(remote, i);
			t.ipv6.daddr[i] = pw_addr_word(local, i);
		}
		t.ipv6.sport = bpf_htons(rport);
		t.ipv6.dport = bpf_htons(lport);
		len = sizeof(t.ipv6);
	}
	if (proto == IPPROTO_TCP) {
		sk = bpf_skc_lookup_tcp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
		if (!sk)
			return 0;
		has = !connected || (sk->state != BPF_TCP_LISTEN && sk->state != BPF_TCP_TIME_WAIT);
	} else {
		sk = bpf_sk_lookup_udp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
		if (!sk)
			return 0;
		has = !connected || sk->dst_port;
	}
	bpf_sk_release(sk);
	return has;
}

/*
 * May the new flow not have this source port, because of a socket of the
 * host's? Of the host's own ports one that any socket uses is not ours to
 * give. What the host has heard or said under this very tuple without us
 * (first: and the port is the client's own) must be told from the flow.
 */
__noinline int pw_port_in_use(struct __sk_buff *skb, __u8 proto, __u16 port, int first)
{
	struct pw_scratch *s = pw_get_scratch();

	if (!s)
		return 1;
	/* Answers to that would be taken for the tunnel's. */
	if (!first && proto == IPPROTO_UDP && port == cfg_vxlan_port)
		return 1;
	if (s->snat || s->fwd.from.kind == PW_PLACE_HOST)
		return pw_has_socket(skb, proto, &s->fwd.src, port, &s->fwd.dst, s->fwd.dport,
				     first);
	/* A UDP socket connected to a client is this flow's, from before. */
	return s->fwd.to.kind == PW_PLACE_HOST && proto == IPPROTO_TCP &&
	       pw_has_socket(skb, proto, &s->fwd.dst, s->fwd.dport, &s->fwd.src, port, 1);
}

/* One of the ports that may be given away, each as likely as any other. */
static __always_inline __u16 pw_port_any(void)
{
	__u32 total = 0, i, at;

#pragma unroll
	for (i = 0; i < PW_PORT_RANGES; i++)
		total += cfg_ports[i].count;
	at = ((__u64)bpf_get_prandom_u32() * total) >> 32;
#pragma unroll
	for (i = 0; i < PW_PORT_RANGES - 1; i++) {
		if (at < cfg_ports[i].count)
			break;
		at -= cfg_ports[i].count;
	}
	return cfg_ports[i].first + at;
}

struct pw_port_search {
	struct __sk_buff *skb;
	__u32 found;
	__u32 pad;
};

static long pw_port_step(__u32 i, struct pw_port_search *c)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *f;

	if (!s)
		return 1;
	s->rev_key.dport = pw_port_any();
	f = pw_flow_peek(&s->rev_key);
	if (f && !pw_flow_expired(&s->rev_key, f, PW_SCRATCH_PACKET))
		return 0;
	if (pw_port_in_use(c->skb, s->rev_key.proto, s->rev_key.dport, 0))
		return 0;
	c->found = 1;
	return 1;
}

/*
 * Leaves a port in the scratch's rev_key that seems free, most being taken; 0
 * if none was found. That costs as much as a hundred packets do: it is not
 * tried again at once for a destination, or whoever holds all ports to one
 * would make each further packet that dear.
 */
static __always_inline int pw_port_search(struct __sk_buff *skb, struct pw_scratch *s)
{
	struct pw_port_search c = { .skb = skb };
	struct pw_crowded *crowded;
	__u64 now = pw_now();
	__u32 hash;

	s->rev_key.dport = 0;
	hash = pw_key_hash(&s->rev_key);
	crowded = &s->crowded[hash % PW_CROWDED];
	if (crowded->hash == hash && crowded->until > now)
		return 0;
	bpf_loop(PW_PORT_SEARCH, pw_port_step, &c, 0);
	if (!c.found) {
		crowded->hash = hash;
		crowded->until = now + PW_CROWDED_FOR;
	}
	return c.found;
}

/* Reserves the source port in rev_key by the insert of the reply's entry. */
static __always_inline int pw_port_reserve(struct pw_scratch *s)
{
	int err;

	s->rev.key_hash = pw_key_hash(&s->rev_key);
	err = pw_flow_insert(PW_REV);
	if (err == PW_INSERTED) {
		s->fwd.sport = s->rev_key.dport;
		s->fwd.flags |= PW_F_XLATE;
	}
	return err;
}

/*
 * The reply tuple belongs to another live flow, or the source becomes this
 * node's: look for a source port whose reply tuple is free and reserve it.
 * Most often the first will do; when nearly all are taken it is searched for,
 * within bounds. An echo's identifier is its port. Protocols without ports
 * share an address as long as their reply tuples differ.
 */
__noinline int pw_flow_other_port(struct __sk_buff *skb, const struct pw_flow_key *key)
{
	struct pw_scratch *s = pw_get_scratch();
	int i, err, ports;

	if (!key || !s)
		return PW_DROP_FLOW_COLLISION;
	ports = pw_has_translatable(key);
	if (!ports && !s->snat)
		return PW_DROP_FLOW_COLLISION;
	for (i = 0; i < PW_PORT_PROBES + PW_PORT_FINDS; i++) {
		s->rev_key.dport = ports ? pw_port_any() : key->sport;
		if (i >= PW_PORT_PROBES) {
			if (!pw_port_search(skb, s))
				break;
		} else if (ports && pw_port_in_use(skb, key->proto, s->rev_key.dport, 0)) {
			continue;
		}
		err = pw_port_reserve(s);
		if (err == PW_INSERTED)
			return 0;
		if (err == PW_NO_ROOM)
			return PW_DROP_FLOW_INSERT;
		if (!ports)
			return PW_DROP_FLOW_COLLISION;
	}
	return s->snat ? PW_DROP_NO_PORT : PW_DROP_FLOW_COLLISION;
}

/*
 * The reply entry: whose is it? Another CPU's that creates this very flow,
 * or what a flood has left of an earlier one of the same tuple; either way it
 * is ours now, with nothing of the past but its birth, which twins share.
 * Returns enum pw_insert, PW_EXISTS for another flow's.
 */
static __always_inline int pw_flow_reserve(struct pw_scratch *s, int *ours)
{
	struct pw_flow *other = NULL;
	int i, err = PW_NO_ROOM;

	*ours = 0;
	for (i = 0; i < PW_RESERVE_TRIES && !other; i++) {
		err = pw_flow_insert(PW_REV);
		if (err != PW_EXISTS) {
			*ours = err == PW_INSERTED;
			return err;
		}
		/* None: it was there, and is being removed by another CPU. */
		other = pw_flow_find(&s->rev_key);
	}
	if (!other)
		return PW_NO_ROOM;
	if (!pw_same_origin(other, &s->rev))
		return PW_EXISTS;
	s->fwd.created = s->rev.created = other->created;
	if (!(other->flags & PW_F_CONFIRMED) && pw_new_put(&s->rev_key, &s->rev))
		return PW_NO_ROOM;
	return PW_INSERTED;
}

struct pw_vacancy {
	const struct pw_flow_key *key;
	__u32 result; /* enum pw_insert */
	__u32 pad;
};

static long pw_vacant_step(__u32 i, struct pw_vacancy *v)
{
	struct pw_flow *f = bpf_map_lookup_elem(&pw_flows, v->key);

	if (!f)
		f = bpf_map_lookup_elem(&pw_flows_new, v->key);
	if (!f)
		v->result = PW_INSERTED;
	else if (f->key_hash == pw_key_hash(v->key))
		v->result = PW_EXISTS;
	return v->result != PW_NO_ROOM;
}

/*
 * Is the tuple free? An old flow that another CPU is just removing is waited
 * for now, while nothing is written: a reply entry that had to be taken back
 * later might be that CPU's by then.
 */
static __always_inline int pw_flow_vacant(const struct pw_flow_key *key)
{
	struct pw_vacancy v = { .key = key, .result = PW_NO_ROOM };

	bpf_loop(PW_VACANT_TRIES, pw_vacant_step, &v, 0);
	return v.result;
}

/* Is the tuple behind a service one that the host uses without it already? */
static __always_inline int pw_host_knows(struct __sk_buff *skb, const struct pw_scratch *s,
					 const struct pw_flow_key *key)
{
	return (s->fwd.service || s->fwd.entry || key->via) && !(s->fwd.flags & PW_F_MIDSTREAM) &&
	       pw_port_in_use(skb, key->proto, s->fwd.sport, 1);
}

/*
 * Writes both entries of a new flow: the scratch's fwd under key, rev under
 * rev_key. The insert of the forward entry decides between two CPUs that
 * create the same flow; the loser takes its reply entry back. missed: neither
 * table had the key, not even one being removed, a moment ago: the insert
 * alone decides. Returns the reason to count: created, race lost (use the
 * winner's entry), or a drop.
 */
__noinline int pw_flow_create(struct __sk_buff *skb, const struct pw_flow_key *key, int missed)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *other;
	int ours, err, result = PW_FLOW_CREATED;

	if (!key || !s)
		return PW_DROP_FLOW_INSERT;
	s->fwd_key = *key;
	err = missed ? PW_INSERTED : pw_flow_vacant(&s->fwd_key);
	if (err != PW_INSERTED)
		return err == PW_EXISTS ? PW_FLOW_RACE_LOST : PW_DROP_FLOW_INSERT;
	s->rev.key_hash = pw_key_hash(&s->rev_key);
	err = PW_EXISTS;
	if (!s->snat && !pw_host_knows(skb, s, key)) {
		err = pw_flow_reserve(s, &ours);
		result = PW_FLOW_PORT_CHANGED;
	}
	if (err == PW_NO_ROOM)
		return PW_DROP_FLOW_INSERT;
	if (err == PW_EXISTS) {
		/* What is not translated cannot have another port. */
		if (s->fwd.frame)
			return PW_DROP_FLOW_COLLISION;
		s->rev.flags |= PW_F_XLATE;
		err = pw_flow_other_port(skb, key);
		if (err)
			return err;
		ours = 1;
	} else {
		result = PW_FLOW_CREATED;
	}
	err = pw_flow_insert(PW_FWD);
	if (err == PW_INSERTED)
		return result;
	/*
	 * Lost: take back the reply entry, unless it is the winner's too. The
	 * entry of a reply is no winner's, see pw_flow_insert, but of a tuple
	 * that is its own reply's.
	 */
	if (ours) {
		other = pw_flow_find(&s->fwd_key);
		if (!other || (other->flags & PW_F_REPLY && s->fwd.key_hash != s->rev.key_hash) ||
		    !pw_addr_eq(&other->dst, &s->fwd.dst) || other->dport != s->fwd.dport ||
		    other->sport != s->fwd.sport)
			pw_new_delete(&s->rev_key);
	}
	return err == PW_EXISTS ? PW_FLOW_RACE_LOST : PW_DROP_FLOW_INSERT;
}

#endif
