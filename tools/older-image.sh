#!/usr/bin/env bash
# Builds the image of an older podweir, which tests on a real cluster go back to
# and upgrade from: tools/older-image.sh ARCHIVE NAME:TAG [COMMIT]. It is built
# once, as long as the commit is the same. In a tree that does not have the
# commit, such as a shallow clone, it is the tree itself with another version:
# then only the version differs, which is said.
set -euo pipefail
cd "$(dirname "$0")/.."

archive=$(realpath -m "${1:?archive to write, such as bin/older/podweir-image.tar}")
name=${2:?name of the image, such as podweir:older}
# The first that says which version it is. Its programs are others, two maps of
# today's it lacks, and pw_frags and pw_metrics have another layout in it.
commit=${3:-200fc67d011077b1e1767865baa3e2eedfe9797d}

mkdir -p "$(dirname "$archive")"
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
	echo "older image: there is no commit $commit here, so it is this tree with another version" >&2
	rm -f "$archive.from"
	exec tools/image.sh "$archive" "$name" older
fi
if [[ -e $archive && $(cat "$archive.from" 2>/dev/null) == "$name $commit" ]]; then
	exit 0
fi
rm -f "$archive.from"
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
git archive "$commit" | tar -x -C "$tree"
(
	cd "$tree"
	tools/bpf2go.sh
	tools/image.sh "$archive" "$name" "older-${commit:0:12}"
)
echo "$name $commit" >"$archive.from"
