package source

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kjson "sigs.k8s.io/json"
)

// manifest is one good object of a file.
type manifest struct {
	key  objectKey
	obj  object
	line int
}

// fault is one mistake in a file. Its key is complete, partly known or empty.
type fault struct {
	key  objectKey
	line int
	err  error
	// loose is set when the kind is unknown, perhaps for a typing mistake:
	// an object of any kind with that name may be meant.
	loose bool
}

// parsed is what one file holds.
type parsed struct {
	objects []manifest
	faults  []fault
	// opaque is set when a document cannot be told apart: any object that the
	// file held before may be in it.
	opaque bool
}

type decoder struct {
	kinds []kind
	out   parsed
	base  int // what to add to a node's line for the line in the file
}

// parseManifests reads the text of a manifest file. It never fails as a
// whole: a bad document is a fault, and the others are delivered.
func parseManifests(all []kind, text string) parsed {
	d := decoder{kinds: all}
	for _, c := range splitDocuments(text) {
		docs, bad := parseChunk(c)
		d.base = c.line - 1
		for _, n := range docs {
			d.document(n, "", "", 0)
		}
		if bad != nil {
			d.out.opaque = true
			d.out.faults = append(d.out.faults, fault{line: bad.line, err: bad.err})
		}
	}
	return d.out
}

func (d *decoder) fault(key objectKey, line int, format string, args ...any) {
	d.out.faults = append(d.out.faults, fault{key: key, line: d.base + line, err: fmt.Errorf(format, args...)})
	if key.name == "" {
		d.out.opaque = true
	}
}

// document reads one object or one list of objects. The API version and kind
// are those that a list gives its items, empty outside of one.
func (d *decoder) document(n *yaml.Node, apiVersion, kindName string, depth int) {
	if n = resolve(n); n == nil || n.Kind != yaml.MappingNode {
		line := 1
		if n != nil {
			line = n.Line
		}
		d.fault(objectKey{}, line, "not an object: write a mapping with apiVersion, kind and metadata")
		return
	}
	if v := member(n, "apiVersion"); v != nil {
		apiVersion = text(v)
	}
	if v := member(n, "kind"); v != nil {
		kindName = text(v)
	}
	if itemKind, isList := strings.CutSuffix(kindName, "List"); isList {
		d.list(n, apiVersion, itemKind, depth)
		return
	}

	key := objectKey{kindName, text(n, "metadata", "namespace"), text(n, "metadata", "name")}
	k, known, err := findKind(d.kinds, apiVersion, kindName)
	if known && !k.clusterWide && key.namespace == "" {
		key.namespace = metav1.NamespaceDefault
	}
	if err != nil {
		line := n.Line
		if v := member(n, "kind"); v != nil && !known {
			line = v.Line
		} else if v := member(n, "apiVersion"); v != nil && known {
			line = v.Line
		}
		d.fault(key, line, "%w", err)
		if !known {
			d.out.faults[len(d.out.faults)-1].loose = slices.ContainsFunc(d.kinds, func(k kind) bool { return k.apiVersion == apiVersion })
		}
		return
	}
	if known && k.clusterWide {
		// Where the mistake of naming a namespace was made, this is still
		// the object it is about.
		key.namespace = ""
	}
	d.object(n, k, key, apiVersion)
}

func (d *decoder) list(n *yaml.Node, apiVersion, itemKind string, depth int) {
	key := objectKey{kind: itemKind + "List"}
	if depth > maxDepth {
		d.fault(key, n.Line, "lists nested too deep: write one list")
		return
	}
	itemVersion := ""
	if itemKind == "" {
		if apiVersion != "v1" {
			d.fault(key, n.Line, "apiVersion %q of a List is not read: write apiVersion: v1", apiVersion)
			return
		}
	} else {
		if _, _, err := findKind(d.kinds, apiVersion, itemKind); err != nil {
			d.fault(key, n.Line, "%w", err)
			return
		}
		itemVersion = apiVersion
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		switch name := n.Content[i].Value; name {
		case "apiVersion", "kind", "metadata", "items":
		default:
			d.fault(key, n.Content[i].Line, "unknown field %q of a list: check its spelling and indentation, or remove it", name)
		}
	}
	items := member(n, "items")
	switch {
	case items == nil:
		d.fault(key, n.Line, "items is missing: write the objects of the list under items")
	case isNull(items):
	case items.Kind != yaml.SequenceNode:
		d.fault(key, items.Line, "items is not a list: begin each object with a dash")
	default:
		for _, item := range items.Content {
			d.document(item, itemVersion, itemKind, depth+1)
		}
	}
}

// object decodes one object strictly and checks it. All its faults are
// reported; it counts as good only without any.
func (d *decoder) object(n *yaml.Node, k kind, key objectKey, apiVersion string) {
	if key.name == "" {
		line := n.Line
		if m := member(n, "metadata"); m != nil {
			line = m.Line
		}
		cause := "metadata.name is missing: give the object a name"
		if text(n, "metadata", "generateName") != "" {
			cause = "metadata.name is missing: nothing here generates names, write one"
		}
		d.fault(key, line, "%s", cause)
		return
	}
	before := len(d.out.faults)
	doc, bad := toJSON(n)
	if bad != nil {
		d.fault(key, bad.line, "%w", bad.err)
		return
	}
	for _, b := range doc.bad {
		d.fault(key, b.line, "%w", b.err)
	}
	obj := k.empty()
	strict, err := kjson.UnmarshalStrict(doc.buf.Bytes(), obj)
	if err != nil {
		line, cause := typeError(doc, k, err)
		if line == 0 {
			line = n.Line
		}
		d.fault(key, line, "%s", cause)
	}
	for _, e := range strict {
		path := ""
		var fe kjson.FieldError
		if errors.As(e, &fe) {
			path = fe.FieldPath()
		}
		if strings.HasPrefix(e.Error(), "unknown field") {
			d.fault(key, lineOf(n, path), "unknown field %q: check its spelling and indentation, or remove it", path)
			continue
		}
		d.fault(key, lineOf(n, path), "%w", e)
	}
	if len(d.out.faults) > before {
		return
	}
	finish(obj, k, key, apiVersion)
	for _, e := range validate(obj, k) {
		d.fault(key, lineOf(n, e.Field), "%s: %s", e.Field, e.ErrorBody())
	}
	if len(d.out.faults) > before {
		return
	}
	d.out.objects = append(d.out.objects, manifest{key, obj, d.base + n.Line})
}

// typeError tells which field has a value of the wrong type. The strict
// decoder keeps the place to itself; the standard one, over the same text and
// type, tells it.
func typeError(doc *jsonDoc, k kind, err error) (int, string) {
	var te *json.UnmarshalTypeError
	if !errors.As(json.Unmarshal(doc.buf.Bytes(), k.empty()), &te) || te.Field == "" {
		return 0, fmt.Sprintf("%s: give the field a value of its type", strings.TrimPrefix(err.Error(), "json: "))
	}
	return doc.lineAt(int(te.Offset) - 1),
		fmt.Sprintf("%s: the value is of type %s; the field takes %s", te.Field, te.Value, typeName(te.Type.String()))
}

func typeName(goType string) string {
	switch {
	case strings.HasPrefix(goType, "int") || strings.HasPrefix(goType, "uint"):
		return "a whole number (" + goType + ")"
	case goType == "bool":
		return "true or false"
	case goType == "string":
		return "a text: put it in quotes"
	case strings.HasPrefix(goType, "[]"):
		return "a list"
	case strings.HasPrefix(goType, "map["):
		return "a mapping"
	}
	if i := strings.LastIndexByte(goType, '.'); i >= 0 {
		goType = goType[i+1:]
	}
	return "a mapping (" + goType + ")"
}

var pathPart = regexp.MustCompile(`\[[^\]]*\]|[^.\[]+`)

// lineOf returns the line of the field at a path such as
// "spec.ports[0].port", or of the deepest part of it that exists.
func lineOf(n *yaml.Node, path string) int {
	n = resolve(n)
	line := n.Line
	for _, part := range pathPart.FindAllString(path, -1) {
		if n == nil {
			break
		}
		if index, ok := strings.CutPrefix(part, "["); ok {
			i, err := strconv.Atoi(strings.TrimSuffix(index, "]"))
			if err == nil && n.Kind == yaml.SequenceNode && i < len(n.Content) && i >= 0 {
				n = n.Content[i]
				line = n.Line
				n = resolve(n)
				continue
			}
			part = strings.TrimSuffix(index, "]")
		}
		found := false
		if n.Kind == yaml.MappingNode {
			for i := 0; i+1 < len(n.Content); i += 2 {
				if n.Content[i].Value == part {
					line, n, found = n.Content[i].Line, resolve(n.Content[i+1]), true
					break
				}
			}
		}
		if !found {
			break
		}
	}
	return line
}

// finish gives an object what the API server would: its namespace, a UID that
// stays the same as long as its name does, and the defaults of its fields.
func finish(obj object, k kind, key objectKey, apiVersion string) {
	if !k.clusterWide {
		obj.SetNamespace(key.namespace)
	}
	if obj.GetUID() == "" {
		obj.SetUID(stableUID(key))
	}
	// Left over when the manifest was copied from a cluster.
	obj.SetResourceVersion("")
	obj.SetManagedFields(nil)
	gv, name := k.apiVersion, k.name
	if apiVersion != "" {
		gv = apiVersion
	}
	setType(obj, gv, name)
	setDefaults(obj)
}

// stableUID derives a UID from what names an object.
func stableUID(key objectKey) types.UID {
	sum := sha256.Sum256([]byte("podweir manifest\x00" + key.kind + "\x00" + key.namespace + "\x00" + key.name))
	sum[6] = sum[6]&0x0f | 0x80 // version 8: made by an own rule
	sum[8] = sum[8]&0x3f | 0x80
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16]))
}
