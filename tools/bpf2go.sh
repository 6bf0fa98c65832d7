#!/usr/bin/env bash
# Compiles bpf/ and writes the Go bindings (not committed): the datapath into
# internal/bpf, single functions of it for tests into test/packet/parts.
# The compiler is pinned: another version is an error, not a surprise.
set -euo pipefail
cd "$(dirname "$0")/.."

CLANG=${CLANG:-clang-19}
STRIP=${LLVM_STRIP:-llvm-strip-19}
for tool in "$CLANG" "$STRIP"; do
	command -v "$tool" >/dev/null || {
		echo "bpf2go: $tool is missing; 'make deps' installs it" >&2
		exit 1
	}
done

types=(pw_addr pw_counter pw_churn_count pw_flow_key pw_flow pw_place pw_gen_ref
	pw_service_key pw_service pw_backend_key pw_backend pw_endpoint pw_peer
	pw_prefix_key pw_node pw_policy_key pw_policy_entry
	pw_backend_st_key pw_maglev_key pw_maglev_slots pw_affinity_key pw_affinity_entry
	pw_frag_key pw_frag pw_src_range_key pw_dev_addr pw_sock_asked pw_ask pw_ask_half pw_event)
args=()
for t in "${types[@]}"; do args+=(-type "$t"); done

root=$PWD
compile() { # folder, package, name, source, options
	cd "$root/$1"
	GOPACKAGE=$2 go tool bpf2go -cc "$CLANG" -strip "$STRIP" -target bpfel -go-package "$2" \
		"${@:5}" "$3" "$root/bpf/$4" -- \
		-O2 -g -mcpu=v3 -std=gnu11 -Wall -Wextra -Werror -Wno-unused-parameter -I"$root/bpf" \
		-I"/usr/include/$(uname -m)-linux-gnu"
}
compile internal/bpf bpf Dp podweir.c "${args[@]}"
compile internal/bpf bpf Guard guard.c
compile test/packet/parts parts Parts parts.c
