package version

import "runtime/debug"

// stamp is written by the linker: tools/ldflags.sh is what says so. A constant
// of the program, and a variable only because the linker knows nothing else.
var stamp string

// String is the version that the program was built as: what its builder said,
// or else what Go knows of the tree, or "devel".
func String() string {
	if stamp != "" {
		return stamp
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}
