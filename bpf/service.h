/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From a service's address and port to one of its backends. */
#ifndef PW_SERVICE_H
#define PW_SERVICE_H

#include "parse.h"
#include "maps.h"

static __always_inline struct pw_service *pw_service_lookup(const struct pw_addr *addr, __u16 port,
							    __u8 proto)
{
	struct pw_service_key k = { .addr = *addr, .port = port, .proto = proto };

	return bpf_map_lookup_elem(&pw_services, &k);
}

/*
 * Picks a backend evenly. A set is written whole before a service points at
 * it and outlives the switch, so a miss means that the set was replaced
 * between the two look-ups: read the service once more.
 */
static __always_inline struct pw_backend *pw_service_pick(const struct pw_addr *addr, __u16 port,
							  __u8 proto, __u32 *id)
{
	struct pw_backend_key k = {};
	struct pw_service *svc;
	struct pw_backend *be;
	int i;

	for (i = 0; i < 2; i++) {
		svc = pw_service_lookup(addr, port, proto);
		if (!svc || !svc->count)
			return NULL;
		*id = svc->id;
		k.set = svc->set;
		/* The high half of the product: even to within 1/2^32. */
		k.slot = ((__u64)bpf_get_prandom_u32() * svc->count) >> 32;
		be = bpf_map_lookup_elem(&pw_backends, &k);
		if (be)
			return be;
	}
	return NULL;
}

#endif
