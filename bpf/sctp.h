/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * SCTP's ports and its CRC32c (RFC 9260 6.8), which covers the whole packet
 * but no address. A CRC is linear: that of the changed packet is the old one
 * and that of the change, which is four bytes and zeros up to the end. Zeros
 * are not read, they are a multiplication by a power of x.
 */
#ifndef PW_SCTP_H
#define PW_SCTP_H

#include "parse.h"

#define PW_CRC32C 0x82f63b78 /* Castagnoli's polynomial, bit 31 = x^0 */
#define PW_CRC_LENGTH_BITS 16

struct pw_sctphdr {
	__u32 ports; /* source and destination, as on the wire */
	__be32 tag;
	__le32 crc;
};

/* x^(8 * 2^k): what the CRC is multiplied by over 2^k bytes of zeros. */
const __u32 pw_crc_zeros[PW_CRC_LENGTH_BITS] = {
	0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a,
	0xb82be955, 0xb8fdb1e7, 0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a,
	0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
};

/* a * b modulo the polynomial. No branches: verified in one pass. */
__noinline __u32 pw_crc_mul(__u32 a, __u32 b)
{
	__u32 product = 0;
	int i;

	for (i = 0; i < 32; i++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = (b >> 1) ^ (PW_CRC32C & -(b & 1));
	}
	return product;
}

/*
 * The length that the IP header tells: a short frame is padded, and the
 * padding is none of the CRC's. 0 if it cannot be read.
 */
static __always_inline __u32 pw_l4_len(struct __sk_buff *skb, const struct pw_pkt *p)
{
	__u32 headers = p->l4 - p->l3, total, off = p->l3;
	__be16 len;

	off += p->v6 ? offsetof(struct ipv6hdr, payload_len) : offsetof(struct iphdr, tot_len);
	if (bpf_skb_load_bytes(skb, off, &len, sizeof(len)))
		return 0;
	total = bpf_ntohs(len) + (p->v6 ? sizeof(struct ipv6hdr) : 0);
	return total > headers ? total - headers : 0;
}

/*
 * Writes the flow's ports. A CRC of 0 stays 0: it is not there yet. That is
 * a packet of this host's SCTP, of a pod's or of the node's, which is left to
 * the device or to the kernel to fill in (CHECKSUM_PARTIAL), and so is every
 * one that is still to be cut into segments (SCTP's GSO): both are computed
 * from the ports that are found then. A right CRC that happens to be 0, one
 * in 2^32, is taken for one of these, and its packet is lost.
 */
__noinline int pw_write_sctp(struct __sk_buff *skb, struct pw_pkt *p, const struct pw_flow *f)
{
	__u32 change, len;
	struct pw_sctphdr h;
	int k;

	if (!p || !f)
		return PW_DROP_HELPER;
	len = pw_l4_len(skb, p);
	if (len < sizeof(h) || bpf_skb_load_bytes(skb, p->l4, &h, sizeof(h)))
		return PW_DROP_HELPER;
	change = h.ports;
	h.ports = bpf_htons(f->sport) | (__u32)bpf_htons(f->dport) << 16;
	change ^= h.ports;
	if (!change)
		return 0;
	/* How long the whole is, the CRC's change depends on. */
	if (p->kind == PW_KIND_FIRST)
		return PW_DROP_FRAGMENT;
	if (h.crc) {
		/* The four bytes themselves count too: so all of the length. */
		for (k = 0; k < PW_CRC_LENGTH_BITS; k++)
			if (len >> k & 1)
				change = pw_crc_mul(change, pw_crc_zeros[k]);
		h.crc ^= change;
	}
	/* CHECKSUM_COMPLETE is of another sort: told of the new bytes. */
	if (bpf_skb_store_bytes(skb, p->l4, &h, sizeof(h), BPF_F_RECOMPUTE_CSUM))
		return PW_DROP_HELPER;
	return 0;
}

#endif
