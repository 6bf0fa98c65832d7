/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The slow path: a flow's first packet, and packets of a flow that must be
 * judged again. Source check, service, destination, policy, route; then the
 * outcome is written down and never computed again while it holds.
 */
#ifndef PW_DECIDE_H
#define PW_DECIDE_H

#include "create.h"
#include "flow.h"
#include "metrics.h"
#include "policy.h"
#include "resolve.h"
#include "service.h"

/*
 * Clients outside, and the nodes themselves, which call NodePorts of others:
 * who may come by the wire to a service, or with an entry node's word.
 */
static __always_inline int pw_may_enter(const struct pw_target *src)
{
	return !src->ifindex && !(src->flags & (PW_PEER_POD | PW_PEER_LOCAL | PW_PEER_SERVICE));
}

/* A client of whom the cluster knows nothing. */
static __always_inline int pw_is_outside(const struct pw_target *src)
{
	return !src->ifindex && !src->node && !(src->flags & ~PW_PEER_PLAIN);
}

/* Who may enter and be answered from here, not by the entry node. */
static __always_inline int pw_may_return(const struct pw_target *src)
{
	return pw_may_enter(src) && !(src->flags & PW_PEER_HOST);
}

/*
 * May packets with this source come from that place? The kernel's martian
 * and reverse-path checks never see a packet that is redirected. A pod of a
 * directly routed node that arrives from the wire comes from that node.
 */
static __always_inline int pw_check_source(struct pw_pkt *p, const struct pw_target *src)
{
	if (p->from.kind == PW_PLACE_HOST)
		return 0;
	if (pw_addr_is_bad_source(&p->key.src))
		return PW_DROP_BAD_SOURCE;
	if (p->from.kind == PW_PLACE_POD)
		return src->ifindex == p->from.id ? 0 : PW_DROP_SPOOFED_SOURCE;
	if (p->from.kind == PW_PLACE_NODE && p->key.via)
		return pw_may_enter(src) ? 0 : PW_DROP_SPOOFED_SOURCE;
	if (p->from.kind == PW_PLACE_NODE && p->service == PW_CALL_NAMED)
		return pw_may_return(src) ? 0 : PW_DROP_SPOOFED_SOURCE;
	if (src->ifindex || src->flags & (PW_PEER_HOST | PW_PEER_LOCAL | PW_PEER_SERVICE))
		return PW_DROP_SPOOFED_SOURCE;
	if (p->from.kind == PW_PLACE_NODE)
		return src->node == p->from.id ? 0 : PW_DROP_SPOOFED_SOURCE;
	if (p->service && pw_may_enter(src))
		return 0;
	/* Other nodes, and their pods, come through the tunnel or directly. */
	if (!(src->flags & (PW_PEER_POD | PW_PEER_NODE)))
		return 0;
	if (!pw_node_plain(src->node))
		return PW_DROP_SPOOFED_SOURCE;
	p->from.kind = PW_PLACE_NODE;
	p->from.id = src->node;
	return 0;
}

/* Nobody but the nodes speaks to where a node's tunnels end. 0 or a reason. */
static __always_inline int pw_is_tunnelled(const struct pw_pkt *p, __u16 dport,
					   const struct pw_target *dst)
{
	if (p->from.kind != PW_PLACE_POD || !(dst->flags & (PW_PEER_NODE | PW_PEER_HOST)))
		return 0;
	if (p->key.proto == IPPROTO_IPIP)
		return PW_DROP_POD_IPIP;
	return p->key.proto == IPPROTO_UDP && dport == cfg_vxlan_port ? PW_DROP_POD_VXLAN : 0;
}

/* Asks the kernel's routing table where addr is, from a device's view. */
__noinline int pw_route(struct __sk_buff *skb, const struct pw_addr *src, const struct pw_addr *dst,
			struct pw_flow *f)
{
	struct bpf_fib_lookup fib = {};
	int err, i;

	if (!src || !dst || !f)
		return PW_DROP_NO_ROUTE;
	fib.ifindex = pw_device(skb);
	if (pw_addr_is_v4(dst)) {
		fib.family = PW_AF_INET;
		fib.ipv4_src = pw_addr_word(src, 3);
		fib.ipv4_dst = pw_addr_word(dst, 3);
	} else {
		fib.family = PW_AF_INET6;
		for (i = 0; i < 4; i++) {
			fib.ipv6_src[i] = pw_addr_word(src, i);
			fib.ipv6_dst[i] = pw_addr_word(dst, i);
		}
	}
	err = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	/*
	 * The neighbour is looked up, and asked for, at every send; this very
	 * packet may be too big for the device, which pw_over_limit tells its
	 * sender.
	 */
	if (err != BPF_FIB_LKUP_RET_SUCCESS && err != BPF_FIB_LKUP_RET_NO_NEIGH &&
	    err != BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return PW_DROP_NO_ROUTE;
	f->to.kind = PW_PLACE_WIRE;
	f->to.id = fib.ifindex;
	/* The next hop's family may differ from the packet's (RFC 8950). */
	if (fib.family == PW_AF_INET)
		pw_addr_v4(&f->nexthop, fib.ipv4_dst);
	else
		pw_addr_copy(&f->nexthop, fib.ipv6_dst);
	return 0;
}

/* Do pods reach the destination under this node's address, if it is outside? */
static __always_inline int pw_masquerades(const struct pw_target *dst)
{
	return pw_masquerade_to(&dst->addr) && !(dst->flags & PW_PEER_PLAIN);
}

/* Where the destination is. Fills fwd->to and what goes with it. */
static __always_inline int pw_place(struct __sk_buff *skb, const struct pw_place *from,
				    const struct pw_addr *src, const struct pw_target *dst,
				    struct pw_flow *fwd)
{
	/* From outside, only services are sent on. */
	int inward = from->kind == PW_PLACE_NODE || (from->kind == PW_PLACE_WIRE && !fwd->service);

	if (dst->ifindex) {
		fwd->to.kind = PW_PLACE_POD;
		fwd->to.id = dst->ifindex;
		fwd->to.flags = dst->place_flags;
		__builtin_memcpy(fwd->mac, dst->mac, 6);
		return 0;
	}
	if (dst->flags & PW_PEER_LOCAL)
		return PW_DROP_NO_ENDPOINT;
	if (dst->flags & PW_PEER_SERVICE)
		return PW_DROP_NO_SERVICE;
	if (dst->flags & PW_PEER_HOST) {
		fwd->to.kind = PW_PLACE_HOST;
		fwd->to.id = 0;
		return 0;
	}
	/*
	 * Node to node needs no tunnel, and the answer would not take it; a
	 * pod goes under this node's address. With a client's own address from
	 * outside it must be the tunnel: it leads the answer back here.
	 */
	if (dst->flags & PW_PEER_NODE &&
	    (from->kind == PW_PLACE_HOST || (from->kind == PW_PLACE_POD && pw_masquerades(dst))))
		return pw_route(skb, src, &fwd->dst, fwd);
	if (dst->node) {
		/* What came for us is never sent on to a third node. */
		if (inward)
			return PW_DROP_NO_ROUTE;
		fwd->to.kind = PW_PLACE_NODE;
		fwd->to.id = dst->node;
		return 0;
	}
	if (dst->flags & PW_PEER_POD)
		return PW_DROP_NO_NODE;
	if (inward)
		return PW_DROP_NO_ROUTE;
	return pw_route(skb, src, &fwd->dst, fwd);
}

/*
 * The address of this node that a packet goes on under: of the device it
 * leaves by, or the node's own (0). The port follows when the flow is made.
 */
static __always_inline int pw_send_as(struct pw_scratch *s, __u32 ifindex)
{
	int v4 = pw_addr_is_v4(&s->fwd.dst);
	struct pw_dev_addr *own = bpf_map_lookup_elem(&pw_dev_addrs, &ifindex);
	__u32 node = 0;

	if (own)
		s->fwd.src = v4 ? own->v4 : own->v6;
	if (!own || pw_addr_is_zero(&s->fwd.src)) {
		own = bpf_map_lookup_elem(&pw_dev_addrs, &node);
		if (!own)
			return PW_DROP_NO_SOURCE;
		s->fwd.src = v4 ? own->v4 : own->v6;
		if (pw_addr_is_zero(&s->fwd.src))
			return PW_DROP_NO_SOURCE;
	}
	s->fwd.flags |= PW_F_XLATE;
	s->snat = 1;
	return 0;
}

/*
 * Does the frontend that was called hide its callers, pods and this host too,
 * as kube-proxy has it? What goes to this very host's stack stays as it is,
 * there as here.
 */
static __always_inline int pw_hides_callers(const struct pw_scratch *s)
{
	return cfg_snat &&
	       (s->svc_flags & (PW_SVC_EXTERNAL | PW_SVC_KEEP_SOURCE)) == PW_SVC_EXTERNAL;
}

/* Under which address does the packet go on? Sets s->fwd.src. */
static __always_inline int pw_source(const struct pw_pkt *p, struct pw_scratch *s)
{
	s->snat = 0;
	if (p->from.kind == PW_PLACE_HOST) {
		/*
		 * The host calls itself: under the service's address, so that
		 * the answer comes by here and is translated.
		 */
		if (s->fwd.service && s->dst.flags & PW_PEER_HOST)
			s->fwd.src = p->key.dst;
		/*
		 * An address that only this node knows as its own, such as a
		 * virtual one, would lead no answer back.
		 */
		else if (s->fwd.service && !(s->src.flags & PW_PEER_INTERNAL)) {
			if (s->fwd.to.kind == PW_PLACE_NODE)
				return pw_send_as(s, 0);
			if (s->fwd.to.kind == PW_PLACE_WIRE)
				return pw_send_as(s, s->fwd.to.id);
			if (s->fwd.to.kind == PW_PLACE_POD && pw_hides_callers(s))
				return pw_send_as(s, 0);
		}
		return 0;
	}
	if (p->from.kind == PW_PLACE_POD) {
		/* By its service to itself: it would not take it from itself. */
		if (s->fwd.service && pw_addr_eq(&s->fwd.dst, &p->key.src))
			return pw_send_as(s, 0);
		if (s->fwd.to.kind == PW_PLACE_WIRE && pw_masquerades(&s->dst))
			return pw_send_as(s, s->fwd.to.id);
		if (s->fwd.service && s->fwd.to.kind != PW_PLACE_HOST && pw_hides_callers(s))
			return pw_send_as(s, 0);
		return 0;
	}
	if (p->from.kind != PW_PLACE_WIRE || !s->fwd.service)
		return 0;
	/* To a backend outside: its answer must come back to us. */
	if (s->fwd.to.kind == PW_PLACE_WIRE)
		return pw_send_as(s, s->fwd.to.id);
	if (s->fwd.to.kind != PW_PLACE_HOST && cfg_snat && !(s->svc_flags & PW_SVC_KEEP_SOURCE)) {
		if (s->fwd.to.kind == PW_PLACE_NODE && !pw_node_direct(s->fwd.to.id))
			s->fwd.flags |= PW_F_CLAMP;
		return pw_send_as(s, 0);
	}
	if (s->fwd.to.kind == PW_PLACE_NODE) {
		s->fwd.flags |= PW_F_TUNNEL | PW_F_CLAMP;
		if (cfg_dsr && s->svc_flags & PW_SVC_EXTERNAL && pw_is_outside(&s->src))
			pw_name_backend(p, s);
	}
	return 0;
}

/*
 * Egress of the source, then ingress of the destination; both must allow.
 * The node reaches its own pods, a pod itself, whatever the policies say.
 * Returns 0 or the reason; fwd->rule names the last rule that spoke.
 */
static __always_inline int pw_judge(const struct pw_place *from, const struct pw_addr *src_addr,
				    __u8 proto, const struct pw_target *src,
				    const struct pw_target *dst, struct pw_flow *fwd)
{
	__u32 rule = 0, in = 0;

	fwd->rule = 0;
	if (pw_addr_eq(src_addr, &fwd->dst))
		return 0;
	if (from->kind == PW_PLACE_POD) {
		if (pw_policy_verdict(src->policy_out, dst->identity, proto, fwd->dport, &rule) !=
		    PW_VERDICT_ALLOW) {
			fwd->rule = rule;
			return PW_DROP_POLICY_EGRESS;
		}
	}
	if (fwd->to.kind == PW_PLACE_POD && from->kind != PW_PLACE_HOST) {
		if (pw_policy_verdict(dst->policy_in, src->identity, proto, fwd->dport, &in) !=
		    PW_VERDICT_ALLOW) {
			fwd->rule = in;
			return PW_DROP_POLICY_INGRESS;
		}
	}
	fwd->rule = in ?: rule;
	return 0;
}

/* The reply direction is the mirror image of the forward one. */
static __always_inline int pw_mirror(struct __sk_buff *skb, const struct pw_pkt *p,
				     struct pw_scratch *s)
{
	s->rev = s->fwd;
	s->rev.src = p->key.dst;
	s->rev.dst = p->key.src;
	s->rev.sport = p->key.dport;
	s->rev.dport = p->key.sport;
	s->rev.flags |= PW_F_REPLY;
	s->rev.from = s->fwd.to;
	s->rev.from.flags = 0;
	s->rev.to = p->from;
	s->rev.to.flags = s->src.place_flags;
	s->rev.twin_via = p->key.via;
	/* Answers to an entry node go back by the tunnel that brought it. */
	s->rev.flags &= ~PW_F_TUNNEL;
	if (p->key.via)
		s->rev.flags |= PW_F_TUNNEL;
	__builtin_memcpy(s->rev.mac, s->src.mac, 6);
	/* Segments for here come by the tunnel, those from here do not. */
	if (s->fwd.entry)
		s->rev.flags |= PW_F_CLAMP;

	s->rev_key.src = s->fwd.dst;
	s->rev_key.dst = s->fwd.src;
	s->rev_key.sport = s->fwd.dport;
	s->rev_key.dport = s->fwd.sport;
	s->rev_key.via = 0;
	s->rev_key.proto = p->key.proto;
	s->rev_key.pad = 0;

	/* To a source on the wire: by the route of now, like any reply. */
	if (p->from.kind == PW_PLACE_WIRE || s->fwd.entry)
		return pw_route(skb, &p->key.dst, &p->key.src, &s->rev);
	return 0;
}

/* A segment that may not start a flow: SYN-ACK, RST. */
static __always_inline int pw_never_creates(const struct pw_pkt *p)
{
	if (p->key.proto != IPPROTO_TCP)
		return 0;
	return (p->tcp_flags & PW_TCP_RST_BIT) ||
	       (p->tcp_flags & (PW_TCP_SYN | PW_TCP_ACK)) == (PW_TCP_SYN | PW_TCP_ACK);
}

/*
 * A packet of no known flow. On success s->fwd holds the action and the flow
 * is in the table (unless this segment may not start one). Returns 0, the
 * reason of the drop, or PW_FLOW_RACE_LOST: the tuple is another CPU's flow by
 * now.
 */
__noinline int pw_decide(struct __sk_buff *skb, struct pw_pkt *p)
{
	struct pw_scratch *s = pw_get_scratch();
	int err;

	if (!p || !s)
		return PW_DROP_HELPER;
	__builtin_memset(&s->fwd, 0, sizeof(s->fwd));
	pw_resolve(&p->key.src, &s->src);
	err = pw_check_source(p, &s->src);
	if (err)
		return err;
	if (pw_addr_is_multicast(&p->key.dst))
		return PW_DROP_MULTICAST;
	s->fwd.src = p->key.src;
	s->fwd.sport = p->key.sport;
	err = pw_select(p);
	if (err)
		return err;
	pw_resolve(&s->fwd.dst, &s->dst);
	err = pw_is_tunnelled(p, s->fwd.dport, &s->dst);
	if (err)
		return err;
	err = pw_place(skb, &p->from, &p->key.src, &s->dst, &s->fwd);
	if (err)
		return err;
	err = pw_judge(&p->from, &p->key.src, p->key.proto, &s->src, &s->dst, &s->fwd);
	if (err)
		return err;

	err = pw_source(p, s);
	if (err)
		return err;
	s->fwd.from = p->from;
	s->fwd.from.flags = 0;
	s->fwd.verdict = PW_VERDICT_ALLOW;
	s->fwd.src_gen = s->src.gen;
	s->fwd.dst_gen = s->dst.gen;
	s->fwd.last_seen = s->fwd.created = pw_now();
	s->fwd.key_hash = pw_key_hash(&p->key);
	if (pw_never_creates(p))
		return s->snat ? PW_DROP_STRAY : 0;
	if (p->key.proto == IPPROTO_TCP && !(p->tcp_flags & PW_TCP_SYN)) {
		s->fwd.flags |= PW_F_MIDSTREAM;
		pw_count(PW_FLOW_MIDSTREAM, p->hook, p->v6, skb->len);
	}
	err = pw_mirror(skb, p, s);
	if (err)
		return err;
	err = pw_flow_create(skb, &p->key, p->missed);
	if (err >= PW_DROP_MALFORMED)
		return err;
	pw_count(err, p->hook, p->v6, skb->len);
	return err == PW_FLOW_RACE_LOST ? err : 0;
}

/* Does a flow's source still live where the flow comes from? */
static __always_inline int pw_still_there(const struct pw_flow *orig, __u16 via,
					  const struct pw_target *src)
{
	const struct pw_place *from = &orig->from;

	if (from->kind == PW_PLACE_HOST)
		return 1;
	if (from->kind == PW_PLACE_POD)
		return src->ifindex == from->id;
	if (orig->entry)
		return pw_may_return(src);
	if (from->kind == PW_PLACE_NODE && !via)
		return !src->ifindex && src->node == from->id;
	if (via || orig->service || orig->to.kind == PW_PLACE_HOST)
		return pw_may_enter(src) && (via || !(src->flags & PW_PEER_HOST));
	return pw_is_outside(src);
}

/*
 * Does a flow go on under an address of this node that is none by now? Then
 * its answers come here no more. One that is still there stays, whatever the
 * device that the packets leave by.
 */
static __always_inline int pw_source_is_gone(const struct pw_scratch *s, const struct pw_addr *src)
{
	struct pw_peer *peer;

	/* A host that calls itself has the service's address. */
	if (pw_addr_eq(&s->fwd.src, src) || s->fwd.to.kind == PW_PLACE_HOST)
		return 0;
	peer = pw_peer_lookup(&s->fwd.src);
	return !peer || !(peer->flags & PW_PEER_HOST);
}

/*
 * A flow one of whose generations moved: verdict and route once more, in the
 * ORIGINAL direction, from whichever entry the packet met; for answers by the
 * wire their route, too. The backend stays, but a UDP client whose own is gone gets another with its next datagram;
 * until then the old one's answers pass, judged one by one. A denial keeps entry and translation, so that the flow goes on when it is
 * allowed again. p and f are this packet's; both entries are updated.
 */
__noinline int pw_redecide(struct __sk_buff *skb, struct pw_pkt *p, struct pw_flow *f)
{
	struct pw_scratch *s = pw_get_scratch();
	struct pw_flow *twin, *orig, *reply;
	struct pw_flow_key twin_key;
	struct pw_addr src;
	int err, lost = 0;

	if (!p || !f || !s)
		return PW_DROP_HELPER;
	twin = pw_twin_find(&p->key, f, &twin_key);
	if (!twin)
		return -1;
	if (f->flags & PW_F_REPLY) {
		orig = twin;
		reply = f;
		src = twin_key.src;
	} else {
		orig = f;
		reply = twin;
		src = p->key.src;
	}
	s->fwd = *orig;
	if (s->fwd.frame) {
		s->fwd.dst = s->fwd.nexthop;
		s->fwd.dport = pw_named_port(&s->fwd);
	}
	pw_resolve(&src, &s->src);
	pw_resolve(&s->fwd.dst, &s->dst);
	/* Another has the address by now: not this flow any more. */
	if (!pw_still_there(orig, reply->twin_via, &s->src) || pw_source_is_gone(s, &src))
		return -1;
	if (p->key.proto == IPPROTO_UDP) {
		lost = !pw_service_holds(
			orig == f ? pw_key_arg(s, &p->key) : pw_key_arg(s, &twin_key), orig);
		if (lost && orig == f) {
			pw_count(PW_FLOW_RESELECTED, p->hook, p->v6, skb->len);
			return -1;
		}
	}
	s->fwd.to.flags = 0;
	err = pw_place(skb, &s->fwd.from, &src, &s->dst, &s->fwd);
	/* Frames can name what is behind that node; else it would be another flow. */
	if (!err && orig->frame && (s->fwd.to.kind != PW_PLACE_NODE || s->fwd.to.id != orig->to.id))
		return -1;
	if (!err)
		err = pw_judge(&s->fwd.from, &src, p->key.proto, &s->src, &s->dst, &s->fwd);
	s->rev = *reply;
	if (!err && (s->fwd.from.kind == PW_PLACE_WIRE || s->fwd.entry))
		err = pw_route(skb, &s->rev.src, &src, &s->rev);

	orig->verdict = reply->verdict = err ? PW_VERDICT_DENY : PW_VERDICT_ALLOW;
	orig->reason = reply->reason = err;
	orig->rule = reply->rule = s->fwd.rule;
	if (!err) {
		orig->to = reply->from = s->fwd.to;
		reply->from.flags = 0;
		s->rev.to.flags = s->src.place_flags;
		orig->nexthop = s->fwd.nexthop;
		reply->to = s->rev.to;
		reply->nexthop = s->rev.nexthop;
		__builtin_memcpy(orig->mac, s->fwd.mac, 6);
	}
	if (lost)
		return 0;
	/* Last: until here the other direction judges for itself. */
	orig->src_gen = reply->src_gen = s->src.gen;
	orig->dst_gen = reply->dst_gen = s->dst.gen;
	return 0;
}

#endif
