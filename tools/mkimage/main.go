// Command mkimage writes a container image from static programs, without a
// container engine: see package image.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/podweir/podweir/internal/image"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "mkimage:", err)
		os.Exit(1)
	}
}

func run() error {
	im := image.Image{
		Architecture: runtime.GOARCH,
		Files:        map[string]string{}, Links: map[string]string{"var/run": "/run"},
		Env:    []string{"PATH=/usr/bin"},
		Labels: map[string]string{},
	}
	out := flag.String("o", "", "archive to write")
	flag.StringVar(&im.Architecture, "arch", im.Architecture, "architecture of the programs, as GOARCH has it")
	flag.Func("name", "NAME:TAG of the image; may be given again", func(s string) error {
		im.Names = append(im.Names, s)
		return nil
	})
	flag.Func("label", "KEY=VALUE; may be given again", func(s string) error {
		k, v, ok := strings.Cut(s, "=")
		if !ok {
			return fmt.Errorf("%q is not KEY=VALUE", s)
		}
		im.Labels[k] = v
		return nil
	})
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "mkimage -o ARCHIVE -name NAME:TAG PROGRAM...\n\nThe programs come to /usr/bin, the first is the entrypoint. SOURCE_DATE_EPOCH\nin the environment is the time of everything in the image (default 0).")
		flag.PrintDefaults()
	}
	flag.Parse()
	if *out == "" || flag.NArg() == 0 {
		flag.Usage()
		return fmt.Errorf("-o and at least one program are needed")
	}
	epoch, err := strconv.ParseInt("0"+os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	im.Created = time.Unix(epoch, 0)
	for i, p := range flag.Args() {
		to := "usr/bin/" + filepath.Base(p)
		im.Files[to] = p
		if i == 0 {
			im.Entrypoint = []string{"/" + to}
		}
	}
	digest, err := im.WriteFile(*out)
	if err != nil {
		return err
	}
	fi, err := os.Stat(*out)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %s, %s, %.1f MB\n", *out, im.Names[0], digest, float64(fi.Size())/1e6)
	return nil
}
