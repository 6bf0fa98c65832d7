#!/usr/bin/env bash
# Installs the programs that building and testing need, from apt, and only
# those that are missing. Go itself is not among them. With "cluster" those of
# make cluster, too.
set -euo pipefail

# What tells that it is there, and the package it comes from.
needs=(
	"clang-19 clang-19"
	"llvm-strip-19 llvm-19"
	"clang-format-19 clang-format-19"
	"/usr/include/bpf/bpf_helpers.h libbpf-dev"
	"/usr/include/linux/bpf.h linux-libc-dev"
	"bpftool bpftool"
	"ip iproute2"
	"tcpdump tcpdump"
	"ethtool ethtool"
	"iptables iptables"
	"ipset ipset"
	"nft nftables"
	"qemu-system-x86_64 qemu-system-x86"
	"dpkg-deb dpkg"
	"xz xz-utils"
)
if [[ ${1:-} == cluster ]]; then
	needs+=(
		"containerd containerd"
		"runc runc"
		"nsenter util-linux"
	)
fi

PATH=$PATH:/usr/sbin:/sbin
missing=()
for need in "${needs[@]}"; do
	read -r what package <<<"$need"
	case $what in
	/*) [[ -e $what ]] || missing+=("$package") ;;
	*) command -v "$what" >/dev/null || missing+=("$package") ;;
	esac
done
command -v go >/dev/null || {
	echo "deps: Go is missing; see go.mod for the version and https://go.dev/dl" >&2
	exit 1
}
((${#missing[@]})) || exit 0

echo "deps: installing ${missing[*]}"
command -v apt-get >/dev/null || {
	echo "deps: no apt-get here; install by hand: ${missing[*]}" >&2
	exit 1
}
((EUID == 0)) || {
	echo "deps: run as root, or: apt-get install ${missing[*]}" >&2
	exit 1
}
export DEBIAN_FRONTEND=noninteractive
apt-get install -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
	apt-get update -q
	apt-get install -y --no-install-recommends "${missing[@]}"
}
