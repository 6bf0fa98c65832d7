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
status=0 job=

# finish takes the cluster down and says the sum: in every case, and last. What
# failed without a line of its own, or was cut off, counts as one.
finish() {
	trap '' INT TERM HUP
	bin/pw-cluster down || status=1
	awk -v status=$status '/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { passed += $1; failed += $3; skipped += $5; sums++ }
		END { if (!failed && (sums < 2 || status)) failed = 1; printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped; exit failed > 0 }' "$sums" ||
		status=$((status ? status : 1))
	rm -f "$sums"
	exit $status
}

# stop ends what runs, which is a process group of its own, and waits for it:
# the checks take down what they have brought up.
stop() {
	trap '' INT TERM HUP
	status=$1
	if [[ -n $job ]]; then
		kill -TERM -- -"$job" 2>/dev/null
		wait "$job"
		for _ in {1..60}; do
			kill -0 -- -"$job" 2>/dev/null || break
			sleep 1
		done
		kill -KILL -- -"$job" 2>/dev/null
	fi
	exit
}
trap finish EXIT
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP

# run runs a command, and keeps what it prints. A signal is heard meanwhile.
run() {
	set -m
	("$@" | tee -a "$sums") </dev/null &
	job=$!
	set +m
	wait "$job"
	local rc=$?
	job=
	return $rc
}

run make -s test || status=1
# Before the rest, as it is long and worth to be seen.
tools/deps.sh cluster && run bin/pw-cluster build && run tools/older-image.sh bin/older/podweir-image.tar podweir:older || status=1
run bin/testsum \
	-check 'cluster with kube-proxy, nftables, and from there to podweir node by node=tools/test-all.sh peer kube-proxy-nftables bridge-vxlan node-by-node' \
	-check 'cluster with kube-proxy, iptables, and from there to podweir as a whole=tools/test-all.sh peer kube-proxy-iptables bridge whole' \
	-check 'cluster with podweir=tools/test-all.sh up' -- \
	-tags realcluster -count=1 -timeout 45m -parallel 64 -exec "$PWD/bin/pw-cluster outside" ${CLUSTER_TESTS:-} ./test/realcluster/e2e ||
	{ status=1; bin/pw-cluster describe; }
