// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Single functions of the datapath for tests that call them alone. Not a part
 * of what is installed.
 */
#include "answer.h"
#include "mss.h"
#include "policy.h"

char _license[] SEC("license") = "Dual BSD/GPL";

const volatile __u32 cfg_mtu = 1450;

/* The answer, if there is one, goes back by the device. */
static __always_inline int pw_back(struct __sk_buff *skb, int err)
{
	return err ? PW_SHOT : bpf_redirect(skb->ifindex, 0);
}

SEC("tc")
int part_refuse(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p))
		return PW_NEXT;
	return pw_back(skb, pw_refuse(skb, &p));
}

SEC("tc")
int part_too_big(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p))
		return PW_NEXT;
	return pw_back(skb, pw_too_big(skb, &p, cfg_mtu));
}

/*
 * Makes it what a packet out of a tunnel header is: it still counts as
 * encapsulated when the header is off.
 */
static __always_inline int pw_nest(struct __sk_buff *skb, const struct pw_pkt *p)
{
	__u64 flags = p->v6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;
	__s32 len = pw_ip_len(p);

	return bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC, flags | BPF_F_ADJ_ROOM_FIXED_GSO) ||
	       bpf_skb_adjust_room(skb, -len, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
}

SEC("tc")
int part_refuse_nested(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p) || pw_nest(skb, &p))
		return PW_NEXT;
	return pw_back(skb, pw_refuse(skb, &p));
}

SEC("tc")
int part_too_big_nested(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p) || pw_nest(skb, &p))
		return PW_NEXT;
	return pw_back(skb, pw_too_big(skb, &p, cfg_mtu));
}

SEC("tc")
int part_clamp_mss(struct __sk_buff *skb)
{
	struct pw_pkt p = { .hook = PW_FROM_NETDEV };

	if (pw_parse(skb, &p))
		return PW_NEXT;
	return pw_clamp_mss(skb, &p, cfg_mtu);
}

#define PART_QUESTIONS_AT 16 /* behind what stands for an Ethernet header */
#define PART_QUESTIONS_MAX 256

/* A question about a verdict; rule and verdict are for the answer. */
struct part_question {
	__u32 table;
	__u32 identity;
	__u32 rule;
	__u16 port;
	__u8 proto;
	__u8 verdict;
};
PW_ASSERT_SIZE(struct part_question, 16);

static long part_answer(__u32 i, struct __sk_buff **skb)
{
	__u32 at = PART_QUESTIONS_AT + i * sizeof(struct part_question);
	struct part_question q;

	if (bpf_skb_load_bytes(*skb, at, &q, sizeof(q)))
		return 1;
	q.rule = 0;
	q.verdict = pw_policy_verdict(q.table, q.identity, q.proto, q.port, &q.rule);
	return bpf_skb_store_bytes(*skb, at, &q, sizeof(q), 0) != 0;
}

/* Answers the questions that a packet consists of. */
SEC("tc")
int part_verdicts(struct __sk_buff *skb)
{
	bpf_loop(PART_QUESTIONS_MAX, part_answer, &skb, 0);
	return PW_NEXT;
}
