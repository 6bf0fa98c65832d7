package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func example(t *testing.T) Image {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"program": 0o700, "text": 0o600} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("this is "+name), mode); err != nil {
			t.Fatal(err)
		}
	}
	return Image{
		Names: []string{"podweir:dev", "registry.example/net/podweir:1"}, Architecture: "amd64", Created: time.Unix(1_700_000_000, 0),
		Files:      map[string]string{"usr/bin/program": filepath.Join(dir, "program"), "etc/text": filepath.Join(dir, "text")},
		Links:      map[string]string{"var/run": "/run"},
		Entrypoint: []string{"/usr/bin/program"}, Labels: map[string]string{"b": "2", "a": "1"},
	}
}

func write(t *testing.T, im Image) (archive []byte, digest string) {
	t.Helper()
	var out bytes.Buffer
	digest, err := im.Write(&out)
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes(), digest
}

// entries reads a tar; folders and links stand with what they are.
func entries(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	out := map[string]string{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 1_700_000_000 {
			t.Errorf("%s: owner %d:%d, time %v", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		switch h.Typeflag {
		case tar.TypeDir:
			out[h.Name] = "folder"
		case tar.TypeSymlink:
			out[h.Name] = "-> " + h.Linkname
		default:
			out[h.Name] = h.FileInfo().Mode().String() + " " + string(data)
		}
	}
}

// The archive is followed as its readers do, from both of its ends.
func TestArchive(t *testing.T) {
	archive, digest := write(t, example(t))
	files := entries(t, bytes.NewReader(archive))
	content := func(name string) []byte {
		_, data, ok := strings.Cut(files[name], " ")
		if !ok {
			t.Fatalf("the archive has no %s", name)
		}
		return []byte(data)
	}
	blobAt := func(digest string) []byte {
		data := content("blobs/" + strings.Replace(digest, ":", "/", 1))
		if newBlob(data).digest != digest {
			t.Fatalf("blob %s has another digest", digest)
		}
		return data
	}
	decode := func(data []byte, into any) {
		if err := json.Unmarshal(data, into); err != nil {
			t.Fatalf("%v: %s", err, data)
		}
	}

	var index struct{ Manifests []descriptor }
	decode(content("index.json"), &index)
	var names []string
	for _, m := range index.Manifests {
		names = append(names, m.Annotations["io.containerd.image.name"])
		if m.Digest != digest {
			t.Errorf("index leads to %s, not to %s", m.Digest, digest)
		}
	}
	if want := []string{"docker.io/library/podweir:dev", "registry.example/net/podweir:1"}; !slices.Equal(names, want) {
		t.Errorf("names %v, want %v", names, want)
	}
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	decode(blobAt(digest), &manifest)
	var docker []struct {
		Config           string
		RepoTags, Layers []string
	}
	decode(content("manifest.json"), &docker)
	if docker[0].Config != newBlob(blobAt(manifest.Config.Digest)).path() || docker[0].Layers[0] != newBlob(blobAt(manifest.Layers[0].Digest)).path() {
		t.Errorf("manifest.json leads elsewhere than index.json: %+v", docker)
	}
	if !slices.Equal(docker[0].RepoTags, []string{"podweir:dev", "registry.example/net/podweir:1"}) {
		t.Errorf("manifest.json: names %v", docker[0].RepoTags)
	}
	var config struct {
		Architecture string
		Config       struct{ Entrypoint []string }
		Rootfs       struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	decode(blobAt(manifest.Config.Digest), &config)
	if config.Architecture != "amd64" || !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/program"}) {
		t.Errorf("config %+v", config)
	}

	unzip, err := gzip.NewReader(bytes.NewReader(blobAt(manifest.Layers[0].Digest)))
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(unzip)
	if err != nil {
		t.Fatal(err)
	}
	if newBlob(layer).digest != config.Rootfs.DiffIDs[0] {
		t.Error("diff_ids is not the digest of the unpacked layer")
	}
	want := map[string]string{
		"etc/": "folder", "etc/text": "-rw-r--r-- this is text",
		"usr/": "folder", "usr/bin/": "folder", "usr/bin/program": "-rwxr-xr-x this is program",
		"var/": "folder", "var/run": "-> /run",
	}
	have := entries(t, bytes.NewReader(layer))
	for name, is := range want {
		if have[name] != is {
			t.Errorf("%s: %q, want %q", name, have[name], is)
		}
	}
	if len(have) != len(want) {
		t.Errorf("layer has %v", have)
	}
}

func TestReproducible(t *testing.T) {
	im := example(t)
	first, digest := write(t, im)
	for range 5 { // maps are walked in another order each time
		again, d := write(t, im)
		if d != digest || !bytes.Equal(first, again) {
			t.Fatalf("the same image came out as %s and as %s", digest, d)
		}
	}
	if err := os.WriteFile(im.Files["etc/text"], []byte("changed"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, d := write(t, im); d == digest {
		t.Error("another file, the same digest")
	}
}

func TestRefused(t *testing.T) {
	for want, change := range map[string]func(*Image){
		"no name":       func(im *Image) { im.Names = nil },
		"NAME:TAG":      func(im *Image) { im.Names = []string{"podweir"} },
		"no clean path": func(im *Image) { im.Files["/bin/x"] = im.Files["etc/text"] },
		"no such file":  func(im *Image) { im.Files["bin/x"] = "/nowhere/x" },
	} {
		im := example(t)
		change(&im)
		if _, err := im.Write(io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
		to := filepath.Join(t.TempDir(), "image.tar")
		if _, err := im.WriteFile(to); err == nil {
			t.Errorf("%s: written", want)
		}
		if left, _ := os.ReadDir(filepath.Dir(to)); len(left) > 0 {
			t.Errorf("%s: left %v", want, left)
		}
	}
}
