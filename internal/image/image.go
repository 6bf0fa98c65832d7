package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/podweir/podweir/internal/wholefile"
)

const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// Image says what to write.
type Image struct {
	Names        []string          // such as podweir:dev; the first is the index's
	Architecture string            // as GOARCH has it
	Created      time.Time         // of the image and of all its files
	Files        map[string]string // path in the image -> file to read
	Links        map[string]string // path in the image -> where to
	Entrypoint   []string
	Cmd          []string
	Env          []string
	Labels       map[string]string
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *platform         `json:"platform,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type blob struct {
	data   []byte
	digest string
}

func newBlob(data []byte) blob {
	sum := sha256.Sum256(data)
	return blob{data, "sha256:" + hex.EncodeToString(sum[:])}
}

func (b blob) path() string { return "blobs/sha256/" + strings.TrimPrefix(b.digest, "sha256:") }

func (b blob) as(mediaType string) descriptor {
	return descriptor{MediaType: mediaType, Digest: b.digest, Size: int64(len(b.data))}
}

// Write writes the archive and returns the digest of the image's manifest.
func (im Image) Write(w io.Writer) (digest string, err error) {
	if len(im.Names) == 0 {
		return "", errors.New("image: it has no name")
	}
	for _, n := range im.Names {
		if name, tag, _ := strings.Cut(n[strings.LastIndex(n, "/")+1:], ":"); name == "" || tag == "" {
			return "", fmt.Errorf("image: %q is not NAME:TAG", n)
		}
	}
	layer, diffID, err := im.layer()
	if err != nil {
		return "", fmt.Errorf("image %s: %w", im.Names[0], err)
	}
	config, err := im.config(diffID)
	if err != nil {
		return "", fmt.Errorf("image %s: %w", im.Names[0], err)
	}
	manifest, err := marshal(map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest,
		"config": config.as(typeConfig), "layers": []descriptor{layer.as(typeLayer)},
	})
	if err != nil {
		return "", fmt.Errorf("image %s: %w", im.Names[0], err)
	}
	var entries []descriptor
	for _, n := range im.Names {
		d := manifest.as(typeManifest)
		d.Platform = &platform{im.Architecture, "linux"}
		d.Annotations = map[string]string{
			"io.containerd.image.name":          full(n),
			"org.opencontainers.image.ref.name": n[strings.LastIndex(n, ":")+1:],
		}
		entries = append(entries, d)
	}
	index, err := marshal(map[string]any{"schemaVersion": 2, "mediaType": typeIndex, "manifests": entries})
	if err != nil {
		return "", fmt.Errorf("image %s: %w", im.Names[0], err)
	}
	docker, err := marshal([]any{map[string]any{"Config": config.path(), "RepoTags": im.Names, "Layers": []string{layer.path()}}})
	if err != nil {
		return "", fmt.Errorf("image %s: %w", im.Names[0], err)
	}
	t := tarball{tar.NewWriter(w), im.Created}
	err = errors.Join(
		t.dir("blobs/"), t.dir("blobs/sha256/"),
		t.file(config.path(), 0o644, config.data), t.file(layer.path(), 0o644, layer.data), t.file(manifest.path(), 0o644, manifest.data),
		t.file("index.json", 0o644, index.data), t.file("manifest.json", 0o644, docker.data),
		t.file("oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)),
		t.Close())
	if err != nil {
		return "", fmt.Errorf("image %s: %w", im.Names[0], err)
	}
	return manifest.digest, nil
}

// WriteFile writes the archive to a file, whole or not at all.
func (im Image) WriteFile(name string) (digest string, err error) {
	err = wholefile.Write(name, wholefile.How{Mode: 0o644}, func(w io.Writer) (err error) {
		digest, err = im.Write(w)
		return err
	})
	if err != nil {
		return "", err
	}
	return digest, nil
}

// full is a name as containerd keeps it.
func full(name string) string {
	host, rest, ok := strings.Cut(name, "/")
	switch {
	case !ok:
		return "docker.io/library/" + name
	case !strings.ContainsAny(host, ".:") && host != "localhost":
		return "docker.io/" + host + "/" + rest
	}
	return name
}

func marshal(v any) (blob, error) {
	data, err := json.Marshal(v)
	return newBlob(data), err
}

func (im Image) config(diffID string) (blob, error) {
	created := im.Created.UTC().Format(time.RFC3339)
	return marshal(map[string]any{
		"created": created, "architecture": im.Architecture, "os": "linux",
		"config": map[string]any{
			"Env": im.Env, "Entrypoint": im.Entrypoint, "Cmd": im.Cmd, "Labels": im.Labels, "WorkingDir": "/",
		},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{diffID}},
		"history": []any{map[string]any{"created": created}},
	})
}

// layer packs the files and returns them with the digest of what was packed.
func (im Image) layer() (packed blob, diffID string, err error) {
	var out bytes.Buffer
	plain := sha256.New()
	zip, err := gzip.NewWriterLevel(&out, gzip.BestSpeed)
	if err != nil {
		return blob{}, "", err
	}
	t := tarball{tar.NewWriter(io.MultiWriter(zip, plain)), im.Created}
	paths := slices.Concat(slices.Collect(maps.Keys(im.Files)), slices.Collect(maps.Keys(im.Links)))
	slices.Sort(paths)
	made := map[string]bool{}
	for _, p := range paths {
		if p != strings.TrimPrefix(path.Clean("/"+p), "/") {
			return blob{}, "", fmt.Errorf("%q is no clean path from the root, such as bin/x", p)
		}
		for i, c := range p {
			if d := p[:i] + "/"; c == '/' && !made[d] {
				made[d] = true
				if err := t.dir(d); err != nil {
					return blob{}, "", err
				}
			}
		}
		if to, ok := im.Links[p]; ok {
			if err := t.link(p, to); err != nil {
				return blob{}, "", err
			}
			continue
		}
		data, err := os.ReadFile(im.Files[p])
		if err != nil {
			return blob{}, "", err
		}
		mode, err := modeOf(im.Files[p])
		if err != nil {
			return blob{}, "", err
		}
		if err := t.file(p, mode, data); err != nil {
			return blob{}, "", err
		}
	}
	if err := errors.Join(t.Close(), zip.Close()); err != nil {
		return blob{}, "", err
	}
	return newBlob(out.Bytes()), "sha256:" + hex.EncodeToString(plain.Sum(nil)), nil
}

// modeOf is 0755 for what may be executed and 0644 for the rest, whatever the
// umask of the build was.
func modeOf(name string) (int64, error) {
	fi, err := os.Stat(name)
	if err != nil {
		return 0, err
	}
	if fi.Mode()&0o100 != 0 {
		return 0o755, nil
	}
	return 0o644, nil
}

type tarball struct {
	*tar.Writer
	at time.Time
}

func (t tarball) dir(name string) error {
	return t.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755, ModTime: t.at, Format: tar.FormatUSTAR})
}

func (t tarball) link(name, to string) error {
	return t.WriteHeader(&tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink, Mode: 0o777, ModTime: t.at, Format: tar.FormatUSTAR})
}

func (t tarball) file(name string, mode int64, data []byte) error {
	err := t.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data)), ModTime: t.at, Format: tar.FormatUSTAR})
	if err == nil {
		_, err = t.Write(data)
	}
	return err
}
