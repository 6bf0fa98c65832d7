#!/usr/bin/env bash
# Builds the container image of podweir into an archive, without a container
# engine: tools/image.sh ARCHIVE [NAME:TAG [VERSION]]. The same tree, version and
# Go give the same bytes, wherever the tree lies.
set -euo pipefail

archive=${1:?archive to write, such as bin/podweir-image.tar}
name=${2:-podweir:dev}
arch=${GOARCH:-$(go env GOARCH)}
stamp=$(tools/ldflags.sh "${3:-}")
programs=$(dirname "$archive")/image-$arch

mkdir -p "$programs"
# -s -w: no symbols and no DWARF, a third of the size; stack traces keep names.
# An empty build id and no VCS stamp: nothing of where and when it was built.
for p in agent:podweir-agent cni:podweir-cni podweir:podweir; do
	CGO_ENABLED=0 GOARCH=$arch go build -trimpath -buildvcs=false -ldflags "-s -w -buildid= $stamp" \
		-o "$programs/${p#*:}" "./cmd/${p%:*}"
done
go run ./tools/mkimage -o "$archive" -arch "$arch" -name "$name" \
	-label org.opencontainers.image.title=podweir \
	-label "org.opencontainers.image.description=Kubernetes node dataplane in eBPF" \
	-label "org.opencontainers.image.licenses=Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)" \
	-label "org.opencontainers.image.version=${stamp##*=}" \
	"$programs"/podweir-{agent,cni} "$programs/podweir"
