package kernels

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// modules is what the datapath needs of a kernel and Debian builds as
// modules; what they depend on comes with them. Built in elsewhere: no error.
var modules = []string{"veth", "vxlan", "sch_ingress", "cls_bpf",
	// what limits what a pod sends, and what is over its device then
	"macvlan", "ifb", "sch_tbf", "cls_u32", "act_mirred"}

// archive writes a cpio archive in the "newc" format (the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst).
type archive struct {
	w   *bytes.Buffer
	ino int
}

func (a *archive) add(name string, mode uint32, rdevMajor, rdevMinor int, data []byte) {
	a.ino++
	fmt.Fprintf(a.w, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, rdevMajor, rdevMinor, len(name)+1, 0, name)
	a.pad()
	a.w.Write(data)
	a.pad()
}

func (a *archive) pad() {
	for a.w.Len()%4 != 0 {
		a.w.WriteByte(0)
	}
}

func (a *archive) dir(name string)               { a.add(name, 0o040755, 0, 0, nil) }
func (a *archive) file(name string, data []byte) { a.add(name, 0o100755, 0, 0, data) }

// writeInitramfs puts init, guest and the modules of a kernel's tree into an
// archive for it.
func writeInitramfs(ctx context.Context, path, tree, initPath, guestPath string) error {
	a := &archive{w: new(bytes.Buffer)}
	for _, d := range []string{"dev", "proc", "sys", "tmp", "modules"} {
		a.dir(d)
	}
	a.add("dev/console", 0o020600, 5, 1, nil)
	for name, from := range map[string]string{"init": initPath, "guest": guestPath} {
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		a.file(name, data)
	}
	k, err := findModules(tree)
	if err != nil {
		return err
	}
	for _, m := range modules {
		if err := k.load(ctx, m); err != nil {
			return err
		}
	}
	var order strings.Builder
	for _, m := range k.order {
		a.file("modules/"+m+".ko", k.images[m])
		fmt.Fprintf(&order, "/modules/%s.ko\n", m)
	}
	a.file("modules/order", []byte(order.String()))
	a.add("TRAILER!!!", 0, 0, 0, nil)
	return os.WriteFile(path, a.w.Bytes(), 0o644)
}

// kernelModules reads modules and what they depend on, in an order in which
// they can be loaded.
type kernelModules struct {
	files   map[string]string // name to file
	builtin map[string]bool
	images  map[string][]byte
	order   []string
}

func findModules(tree string) (*kernelModules, error) {
	k := &kernelModules{files: map[string]string{}, builtin: map[string]bool{}, images: map[string][]byte{}}
	err := filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if d.Name() == "modules.builtin" {
			list, err := os.ReadFile(path)
			for _, p := range strings.Fields(string(list)) {
				k.builtin[moduleName(p)] = true
			}
			return err
		}
		if strings.Contains(d.Name(), ".ko") {
			k.files[moduleName(path)] = path
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find modules in %s: %w", tree, err)
	}
	return k, nil
}

// moduleName is the name of a module's file as other modules refer to it.
func moduleName(path string) string {
	name, _, _ := strings.Cut(filepath.Base(path), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

func (k *kernelModules) load(ctx context.Context, name string) error {
	if k.builtin[name] || k.images[name] != nil {
		return nil
	}
	path, ok := k.files[name]
	if !ok {
		return fmt.Errorf("the kernel package has no module %s", name)
	}
	image, err := os.ReadFile(path)
	if err == nil && strings.HasSuffix(path, ".xz") {
		var out string
		out, err = output(ctx, ".", "xz", "-dc", path)
		image = []byte(out)
	}
	if err != nil {
		return fmt.Errorf("read module %s: %w", path, err)
	}
	k.images[name] = image
	deps, err := dependencies(image)
	if err != nil {
		return fmt.Errorf("read module %s: %w", path, err)
	}
	for _, dep := range deps {
		if err := k.load(ctx, dep); err != nil {
			return fmt.Errorf("%w, which module %s depends on", err, name)
		}
	}
	k.order = append(k.order, name)
	return nil
}

// dependencies reads a module's own word on what it depends on; the package
// has no modules.dep, which is made when a kernel is installed.
func dependencies(image []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no .modinfo section")
	}
	info, err := io.ReadAll(section.Open())
	if err != nil {
		return nil, err
	}
	for _, field := range strings.Split(string(info), "\x00") {
		if list, ok := strings.CutPrefix(field, "depends="); ok && list != "" {
			return strings.Split(strings.ReplaceAll(list, "-", "_"), ","), nil
		}
	}
	return nil, nil
}
