package fakeapi

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
)

const (
	typeJSON     = "application/json"
	typeProtobuf = "application/vnd.kubernetes.protobuf"
)

// format is how objects go over the wire: JSON, or protobuf when the client
// would rather have it.
type format struct {
	contentType string // of single objects and lists
	streamType  string // of watches
	encode      func(runtime.Object) ([]byte, error)
	// frame makes what a watch sends of an encoded object.
	frame func(what watch.EventType, obj []byte) ([]byte, error)
}

func formatOf(req *http.Request, protobuf bool) *format {
	if protobuf && strings.HasPrefix(req.Header.Get("Accept"), typeProtobuf) {
		return &protobufFormat
	}
	return &jsonFormat
}

var jsonFormat = format{
	contentType: typeJSON, streamType: typeJSON,
	encode: func(o runtime.Object) ([]byte, error) { return json.Marshal(o) },
	frame: func(what watch.EventType, obj []byte) ([]byte, error) {
		return json.Marshal(map[string]any{"type": what, "object": json.RawMessage(obj)})
	},
}

var protobufFormat = format{
	contentType: typeProtobuf, streamType: typeProtobuf + ";stream=watch",
	encode: func(o runtime.Object) ([]byte, error) {
		for _, info := range scheme.Codecs.SupportedMediaTypes() {
			if info.MediaType == typeProtobuf {
				var b bytes.Buffer
				err := info.Serializer.Encode(o, &b)
				return b.Bytes(), err
			}
		}
		return nil, fmt.Errorf("the client's scheme has no %s", typeProtobuf)
	},
	frame: func(what watch.EventType, obj []byte) ([]byte, error) {
		e := metav1.WatchEvent{Type: string(what), Object: runtime.RawExtension{Raw: obj}}
		body, err := e.Marshal()
		if err != nil {
			return nil, err
		}
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...), nil
	},
}

// served is an object with its encodings, each made when first asked for and
// kept: a client is not made to wait for them twice.
type served struct {
	obj Object

	mu   sync.Mutex
	wire map[*format][]byte
}

func (s *served) encoded(f *format) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.wire[f]; ok {
		return b, nil
	}
	b, err := f.encode(s.obj)
	if err != nil {
		return nil, err
	}
	if s.wire == nil {
		s.wire = map[*format][]byte{}
	}
	s.wire[f] = b
	return b, nil
}

// list makes the answer to a plain list.
func (f *format) list(r *resource, objs []*served, at metav1.ListMeta) ([]byte, error) {
	if f == &jsonFormat {
		items := make([]json.RawMessage, 0, len(objs))
		for _, o := range objs {
			b, err := o.encoded(f)
			if err != nil {
				return nil, err
			}
			items = append(items, b)
		}
		return json.Marshal(map[string]any{
			"apiVersion": r.apiVersion,
			"kind":       r.kind + "List",
			"metadata":   at,
			"items":      items,
		})
	}
	list, err := scheme.Scheme.New(r.gvk().GroupVersion().WithKind(r.kind + "List"))
	if err != nil {
		return nil, err
	}
	items := make([]runtime.Object, 0, len(objs))
	for _, o := range objs {
		items = append(items, o.obj)
	}
	if err := meta.SetList(list, items); err != nil {
		return nil, err
	}
	access, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	access.SetResourceVersion(at.ResourceVersion)
	access.SetContinue(at.Continue)
	list.GetObjectKind().SetGroupVersionKind(r.gvk().GroupVersion().WithKind(r.kind + "List"))
	return f.encode(list)
}

// Encode encodes all objects in the format that clients will ask for, so that
// no list has to wait for it.
func (s *Server) Encode() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.resources {
		f := &jsonFormat
		if s.protobuf && !r.custom {
			f = &protobufFormat
		}
		for _, o := range r.objects {
			if _, err := o.encoded(f); err != nil {
				return err
			}
		}
	}
	return nil
}
