package cluster

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/podweir/podweir/internal/wholefile"
)

// knownTypes are those of the client library, and ClusterNetworkPolicy.
var knownTypes = sync.OnceValue(func() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(s), v1beta1.Install(s)); err != nil {
		panic(err) // two kinds of one name
	}
	return s
})

// Object is a Kubernetes object of any kind that is known.
type Object interface {
	metav1.Object
	runtime.Object
}

// Manifests is a directory of Kubernetes YAML, one file per object. Files
// appear, change and vanish atomically.
type Manifests struct{ Dir string }

// NewManifests makes the directory if need be.
func NewManifests(dir string) (*Manifests, error) {
	return &Manifests{dir}, os.MkdirAll(dir, 0o755)
}

// File is where an object is kept: kind_namespace_name.yaml.
func (m *Manifests) File(obj Object) (string, error) {
	gvks, _, err := knownTypes().ObjectKinds(obj)
	if err != nil {
		return "", err
	}
	return m.path(gvks[0].Kind, obj.GetNamespace(), obj.GetName()), nil
}

func (m *Manifests) path(kind, namespace, name string) string {
	parts := []string{strings.ToLower(kind), name}
	if namespace != "" {
		parts = []string{strings.ToLower(kind), namespace, name}
	}
	return filepath.Join(m.Dir, strings.Join(parts, "_")+".yaml")
}

// Put writes objects, in this order, new or in place of an earlier version.
func (m *Manifests) Put(objs ...Object) error {
	for _, obj := range objs {
		gvks, _, err := knownTypes().ObjectKinds(obj)
		if err != nil {
			return fmt.Errorf("write %s/%s: %w", obj.GetNamespace(), obj.GetName(), err)
		}
		full := obj.DeepCopyObject()
		full.GetObjectKind().SetGroupVersionKind(gvks[0])
		data, err := yaml.Marshal(full)
		if err != nil {
			return err
		}
		if err := m.write(m.path(gvks[0].Kind, obj.GetNamespace(), obj.GetName()), data); err != nil {
			return err
		}
	}
	return nil
}

// PutRaw writes a file as it is, for manifests that are wrong on purpose.
func (m *Manifests) PutRaw(name string, data []byte) error {
	return m.write(filepath.Join(m.Dir, name), data)
}

// write renames a complete file into place. The temporary one lies beside the
// directory, so that nobody who watches it sees a half-written file.
func (m *Manifests) write(path string, data []byte) error {
	temp := filepath.Join(filepath.Dir(m.Dir), ".manifest-*")
	return wholefile.Write(path, wholefile.How{Temp: temp, Mode: 0o644}, wholefile.Bytes(data))
}

// Delete removes the files of objects. Absent is no error.
func (m *Manifests) Delete(objs ...Object) error {
	for _, obj := range objs {
		file, err := m.File(obj)
		if err != nil {
			return err
		}
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Edit reads an object back, changes it and writes it. T is a pointer type:
//
//	cluster.Edit(c.Manifests, "default", "client", func(p *corev1.Pod) { p.Labels["role"] = "frontend" })
func Edit[T any, P interface {
	*T
	Object
}](m *Manifests, namespace, name string, change func(P)) error {
	obj := P(new(T))
	obj.SetNamespace(namespace)
	obj.SetName(name)
	file, err := m.File(obj)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := yaml.UnmarshalStrict(data, obj); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	change(obj)
	return m.Put(obj)
}

// Load decodes every YAML document in a directory, files in order of name.
// Unknown kinds and fields are errors.
func Load(dir string) ([]Object, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no manifests in %s", dir)
	}
	slices.Sort(files)
	var objs []Object
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		more, err := Decode(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		objs = append(objs, more...)
	}
	return objs, nil
}

// Decode decodes a stream of YAML documents.
func Decode(data []byte) ([]Object, error) {
	decoder := serializer.NewCodecFactory(knownTypes()).UniversalDeserializer()
	docs := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	var objs []Object
	for n := 1; ; n++ {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return objs, nil
		}
		if err != nil {
			return nil, err
		}
		if len(bytes.TrimSpace(doc)) == 0 {
			continue
		}
		robj, _, err := decoder.Decode(doc, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		obj, ok := robj.(Object)
		if !ok {
			return nil, fmt.Errorf("document %d: %T is no object with a name", n, robj)
		}
		// Decoding by the scheme ignores what it does not know; this does not.
		if err := yaml.UnmarshalStrict(doc, obj.DeepCopyObject()); err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		objs = append(objs, obj)
	}
}
