package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// cacheDir is where kernel packages are kept between runs.
func cacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache for kernel packages: %w", err)
	}
	dir = filepath.Join(dir, "podweir", "kernels")
	return dir, os.MkdirAll(dir, 0o755)
}

// fetch returns the unpacked newest cloud kernel of a series ("6.1") that
// apt offers. Only the newest of a series stays in the cache.
func fetch(ctx context.Context, series string) (tree string, err error) {
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock-"+series), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	pkg, err := offered(ctx, series)
	if err != nil {
		return "", err
	}
	tree = filepath.Join(dir, series, pkg)
	if _, err := os.Stat(tree); err == nil {
		return tree, nil
	}
	if err := os.RemoveAll(filepath.Join(dir, series)); err != nil {
		return "", err
	}
	work := filepath.Join(dir, series, "incoming")
	if err := os.MkdirAll(filepath.Join(work, "tree"), 0o755); err != nil {
		return "", err
	}
	if _, err := output(ctx, work, "apt-get", "download", pkg); err != nil {
		return "", fmt.Errorf("fetch kernel %s: %w", pkg, err)
	}
	debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil || len(debs) != 1 {
		return "", errors.Join(err, fmt.Errorf("fetch kernel %s: apt-get left %d packages in %s", pkg, len(debs), work))
	}
	if _, err := output(ctx, work, "dpkg-deb", "-x", debs[0], "tree"); err != nil {
		return "", fmt.Errorf("unpack kernel %s: %w", pkg, err)
	}
	// Last: a tree under its own name is a whole one.
	if err := os.Rename(filepath.Join(work, "tree"), tree); err != nil {
		return "", err
	}
	return tree, os.RemoveAll(work)
}

// offered asks apt for the newest package of a series, and refreshes apt's
// lists once if there is none.
func offered(ctx context.Context, series string) (string, error) {
	pkg, err := newest(ctx, series)
	if err != nil || pkg != "" {
		return pkg, err
	}
	if _, err := output(ctx, ".", "apt-get", "update", "-q"); err != nil {
		return "", fmt.Errorf("no %s cloud kernel in apt's lists, and they could not be refreshed: %w", series, err)
	}
	pkg, err = newest(ctx, series)
	if err == nil && pkg == "" {
		err = fmt.Errorf("apt offers no %s cloud kernel (packages linux-image-%s*-cloud-amd64): "+
			"add Debian bookworm and its security updates to apt's sources", series, series)
	}
	return pkg, err
}

func newest(ctx context.Context, series string) (string, error) {
	// 6.1.0-57-cloud-amd64 in bookworm, 6.12.117+deb12-cloud-amd64 as an update.
	name := regexp.MustCompile(`^linux-image-` + regexp.QuoteMeta(series) + `[.][0-9][^ ]*-cloud-amd64$`)
	out, err := output(ctx, ".", "apt-cache", "pkgnames", "linux-image-"+series+".")
	if err != nil {
		return "", fmt.Errorf("ask apt for kernels: %w", err)
	}
	var pkgs []string
	for _, p := range strings.Fields(out) {
		if name.MatchString(p) {
			pkgs = append(pkgs, p)
		}
	}
	slices.SortFunc(pkgs, func(a, b string) int { return compareVersions(b, a) })
	for _, p := range pkgs {
		// Apt also lists names that nothing provides any more.
		policy, err := output(ctx, ".", "apt-cache", "policy", p)
		if err != nil {
			return "", fmt.Errorf("ask apt for kernel %s: %w", p, err)
		}
		if strings.Contains(policy, "://") {
			return p, nil
		}
	}
	return "", nil
}

var digits = regexp.MustCompile(`[0-9]+|[^0-9]+`)

// compareVersions orders names by the numbers in them.
func compareVersions(a, b string) int {
	x, y := digits.FindAllString(a, -1), digits.FindAllString(b, -1)
	return slices.CompareFunc(x, y, func(p, q string) int {
		if len(p) != len(q) && p[0] >= '0' && p[0] <= '9' && q[0] >= '0' && q[0] <= '9' {
			return len(p) - len(q)
		}
		return strings.Compare(p, q)
	})
}

// output runs a program that must succeed.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
