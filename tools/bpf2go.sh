#!/usr/bin/env bash
# Compiles bpf/ and writes the Go bindings into internal/bpf (not committed).
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
	pw_src_range_key pw_dev_addr)
args=()
for t in "${types[@]}"; do args+=(-type "$t"); done

multiarch=/usr/include/$(uname -m)-linux-gnu
cd internal/bpf
GOPACKAGE=bpf go tool bpf2go -cc "$CLANG" -strip "$STRIP" -target bpfel -go-package bpf \
	"${args[@]}" Dp ../../bpf/podweir.c -- \
	-O2 -g -mcpu=v3 -std=gnu11 -Wall -Wextra -Werror -Wno-unused-parameter -I../../bpf -I"$multiarch"
