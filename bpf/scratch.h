/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Working space that the stack has no room for: 512 bytes are all that a
 * whole chain of calls has.
 */
#ifndef PW_SCRATCH_H
#define PW_SCRATCH_H

#include "maps.h"
#include "resolve.h"

/*
 * Whose working space: hooks of one CPU do not interleave, but before 6.11
 * one may interrupt what is run from a process, such as a sweep.
 */
enum pw_scratch_of {
	PW_SCRATCH_PACKET = 0,
	PW_SCRATCH_SWEEP = 1,
	PW_SCRATCH_ASK = 2,
	PW_SCRATCHES = 3,
};

/* What an ICMP error quotes at most: all that IPv6's smallest MTU leaves. */
#define PW_QUOTE_MAX 1232

/* An answer in the making: its headers stand right before l4. */
struct pw_draft {
	__u8 head[56];
	__u8 l4[sizeof(struct pw_icmphdr) + PW_QUOTE_MAX + sizeof(__u32)];
	/* To the verifier the longest frame may start where the shortest does. */
	__u8 pad[28];
};

/* A drop of which there was an event, see pw_tell. */
struct pw_told {
	__u64 until; /* when the same drop is worth another */
	__u32 hash;
	__u32 pad;
};
#define PW_TOLD 64

/* A destination for which no source port was found, see pw_flow_other_port. */
struct pw_crowded {
	__u64 until; /* when it is searched again */
	__u32 hash;
	__u32 pad;
};
#define PW_CROWDED 16

/* Working space. */
struct pw_scratch {
	struct pw_flow fwd;
	struct pw_flow rev;
	struct pw_flow copy;
	struct pw_flow known; /* of an established packet, off the stack */
	struct pw_pkt pkt;    /* from a hook to the slow path */
	struct pw_flow_key fwd_key;
	struct pw_flow_key rev_key;
	struct pw_flow_key embedded;
	struct pw_flow_key twin; /* of the entry being looked at */
	struct pw_flow_key arg;  /* see pw_key_arg */
	struct pw_frag_key frag_key;
	struct pw_frag frag;
	struct pw_frag_origin origin; /* of what goes into the reassembly, or comes out of it */
	struct pw_target src;
	struct pw_target dst;
	struct pw_addr named; /* the backend that a packet's frame names, see dsr.h */
	struct pw_draft draft;
	__u32 svc_flags; /* enum pw_service_flags of the frontend that was called */
	__u32 snat;      /* fwd.src is this node's: the source port must be, too */
	__u32 mtu;       /* of the way that a packet is too big for */
	__u32 cursor;    /* among a segment's options */
	__u16 named_port;
	__u16 pad;
	__u32 pad2;
	__u64 event_due[2];     /* see pw_tell; [1] of denials by policy */
	struct pw_told told[PW_TOLD];
	struct pw_crowded crowded[PW_CROWDED];
	__u64 error_due; /* when the next ICMP error to outside would be due, see pw_may_tell */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PW_SCRATCHES);
	__type(key, __u32);
	__type(value, struct pw_scratch);
} pw_scratch SEC(".maps");

static __always_inline struct pw_scratch *pw_get_scratch_of(__u32 who)
{
	return bpf_map_lookup_elem(&pw_scratch, &who);
}

static __always_inline struct pw_scratch *pw_get_scratch(void)
{
	return pw_get_scratch_of(PW_SCRATCH_PACKET);
}

/* Does it come out of the reassembly, see from_frag.c? */
static __always_inline int pw_is_risen(const struct __sk_buff *skb)
{
	__u32 here = skb->ifindex;

	/* The verifier wants the context read by itself, not through a pointer. */
	asm volatile("" : "+r"(here));
	return cfg_frag_ifindex && here == cfg_frag_ifindex;
}

/* The device of the packet's hook; of the hook where it was first seen. */
static __always_inline __u32 pw_device(const struct __sk_buff *skb)
{
	struct pw_scratch *s;
	__u32 here = skb->ifindex;

	asm volatile("" : "+r"(here));
	if (!pw_is_risen(skb))
		return here;
	s = pw_get_scratch();
	return s ? s->origin.device : here;
}

/*
 * A key that a global function was given, as an argument for map helpers:
 * 6.1 takes it from the stack, a packet or a map, but not from memory that
 * its verifier knows by size alone. Good until the next global call.
 */
static __always_inline const struct pw_flow_key *pw_key_arg(struct pw_scratch *s,
							    const struct pw_flow_key *k)
{
	s->arg = *k;
	return &s->arg;
}

#endif
