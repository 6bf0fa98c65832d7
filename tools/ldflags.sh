#!/usr/bin/env bash
# Prints the flags of the linker that write a version into the programs:
# tools/ldflags.sh [VERSION]. Without one it is that of the tree: its tag, or
# the commit and how far from the last tag it is, with -dirty behind it when
# the tree is not what was committed.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-}
if [[ -z $version ]]; then
	version=$(git describe --tags --always --dirty --abbrev=12 2>/dev/null) || version=devel
fi
if [[ ! $version =~ ^[A-Za-z0-9][A-Za-z0-9._+-]*$ ]]; then
	echo "VERSION=$version: must be letters, digits and . _ + -, such as v1.2.3" >&2
	exit 1
fi
echo "-X github.com/podweir/podweir/internal/version.stamp=$version"
