#!/usr/bin/env bash
# Runs make test, and then what needs Kubernetes: whether clusters with
# kube-proxy, which podweir is compared with, do what they have to, and change
# over to podweir as docs/migration.md says, and the tests of
# test/realcluster/e2e. The clusters have names of their own and are
# taken down in every case. It ends with one line for all of it:
#
#	N passed, M failed, K skipped
set -uo pipefail
cd "$(dirname "$0")/.." || exit

# up brings a cluster up and tries it, or says what is the matter.
up() {
	bin/pw-cluster up "$@" && bin/pw-cluster check && return
	bin/pw-cluster describe
	return 1
}

# A check of testsum, below: a cluster with others in podweir's place, which
# podweir then takes.
if [[ ${1:-} == peer ]]; then
	trap 'bin/pw-cluster down' EXIT
	up -proxy "$2" -cni "$3" || exit
	bin/pw-cluster migrate "$4" && exit
	bin/pw-cluster describe
	exit 1
fi
# Another one: the cluster that the tests then find.
if [[ ${1:-} == up ]]; then
	up
	exit
fi

# What runs that were killed left: their names have the numbers of processes.
for ns in /run/netns/podweir-test-*-host; do
	name=${ns#/run/netns/podweir-} name=${name%-host}
	[[ -e $ns && ! -e /proc/${name#test-} ]] && PODWEIR_CLUSTER_NAME=$name bin/pw-cluster down
done

export PODWEIR_CLUSTER_NAME=test-$$
sums=$(mktemp) || exit
trap 'bin/pw-cluster down; rm -f "$sums"' EXIT
trap 'exit 130' INT TERM HUP

status=0
make -s test | tee -a "$sums" || status=1
# Before the rest, as it is long and worth to be seen.
tools/deps.sh cluster && bin/pw-cluster build && tools/older-image.sh bin/older/podweir-image.tar podweir:older || status=1
bin/testsum \
	-check 'cluster with kube-proxy, nftables, and from there to podweir node by node=tools/test-all.sh peer kube-proxy-nftables bridge-vxlan node-by-node' \
	-check 'cluster with kube-proxy, iptables, and from there to podweir as a whole=tools/test-all.sh peer kube-proxy-iptables bridge whole' \
	-check 'cluster with podweir=tools/test-all.sh up' -- \
	-tags realcluster -count=1 -timeout 45m -parallel 64 -exec "$PWD/bin/pw-cluster outside" ${CLUSTER_TESTS:-} ./test/realcluster/e2e |
	tee -a "$sums" || { status=1; bin/pw-cluster describe; }

awk '/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { passed += $1; failed += $3; skipped += $5; sums++ }
	END { if (sums < 2) failed++; printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }' "$sums"
exit $status
