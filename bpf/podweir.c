// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The one translation unit: all hooks share maps, settings and BTF. */
#include "ask.c"
#include "fragment.c"
#include "frag_peer.c"
#include "from_frag.c"
#include "from_ipip.c"
#include "from_netdev.c"
#include "from_overlay.c"
#include "from_pod.c"
#include "from_pod_judge.c"
#include "from_pod_send.c"
#include "from_pod_wire.c"
#include "maps.h"
#include "slow.c"
#include "sock_connect.c"
#include "sock_peer.c"
#include "sock_release.c"
#include "sweep.c"
#include "to_lo.c"
#include "to_netdev.c"
#include "to_overlay.c"
#include "to_pod.c"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Enums that only Go prints need an anchor, or clang drops them from BTF. */
const volatile enum pw_reason pw_btf_reason = PW_PASS;
const volatile enum pw_hook pw_btf_hook = PW_FROM_POD;
const volatile enum pw_verdict pw_btf_verdict = PW_VERDICT_NONE;
const volatile enum pw_place_kind pw_btf_place = PW_PLACE_NONE;
const volatile enum pw_place_flags pw_btf_place_flags = PW_PLACE_QDISC;
const volatile enum pw_endpoint_flags pw_btf_endpoint = PW_EP_QDISC;
const volatile enum pw_flow_flags pw_btf_flow_flags = PW_F_REPLY;
const volatile enum pw_tcp_state pw_btf_tcp = PW_TCP_RST;
const volatile enum pw_service_flags pw_btf_svc = PW_SVC_ADDR_OWNED;
const volatile enum pw_identity pw_btf_identity = PW_ID_UNKNOWN;
const volatile enum pw_peer_flags pw_btf_peer = PW_PEER_POD;
const volatile enum pw_node_flags pw_btf_node = PW_NODE_DIRECT;
const volatile enum pw_frame pw_btf_frame = PW_FRAME_PLAIN;
const volatile enum pw_policy_kind pw_btf_policy = PW_POL_PORT;
const volatile enum pw_table_flags pw_btf_table = PW_TABLE_DEFAULT;
const volatile enum pw_frag_state pw_btf_frag = PW_FRAG_PORTS;
const volatile enum pw_churn_row pw_btf_churn = PW_CHURN_COUNTED;
const volatile enum pw_families pw_btf_families = PW_IPV4;
const volatile enum pw_backend_state pw_btf_backend = PW_BE_IN;
/* So does a struct that is no map's key or value. */
const struct pw_event *const volatile pw_btf_event = NULL;
const struct pw_ask *const volatile pw_btf_ask = NULL;
