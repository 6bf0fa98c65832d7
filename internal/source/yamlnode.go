package source

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"sort"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	maxFile  = 16 << 20 // bytes of one manifest file
	maxJSON  = 32 << 20 // bytes of one object with its aliases written out
	maxDepth = 100      // levels of nesting in one object
)

// chunk is the text between two "---" lines and the line it begins at,
// counting from 1.
type chunk struct {
	text string
	line int
}

// splitDocuments cuts a YAML stream at its "---" lines, so that a mistake in
// one document leaves the others readable. The marker stays with the document
// that it begins. Directives go with the document that follows them.
func splitDocuments(text string) []chunk {
	var chunks []chunk
	start, startLine := 0, 1
	substance := false // something but blanks, comments and directives
	line := 0
	for pos := 0; pos < len(text); {
		line++
		end := strings.IndexByte(text[pos:], '\n')
		if end < 0 {
			end = len(text)
		} else {
			end += pos + 1
		}
		s := text[pos:end]
		marker := strings.HasPrefix(s, "---") && (len(s) == 3 || strings.ContainsRune(" \t\r\n", rune(s[3])))
		if marker && substance {
			chunks = append(chunks, chunk{text[start:pos], startLine}.bare())
			start, startLine, substance = pos, line, false
		}
		switch trimmed := strings.TrimSpace(s); {
		case marker:
			substance = true
		case trimmed == "" || trimmed[0] == '#' || s[0] == '%':
		default:
			substance = true
		}
		pos = end
	}
	if substance {
		chunks = append(chunks, chunk{text[start:], startLine}.bare())
	}
	return chunks
}

// bare leaves out the marker, blank lines and comments that a document begins
// with. The YAML library tells the lines of mistakes best if the first line is
// the first of the contents.
func (c chunk) bare() chunk {
	for {
		first, rest, more := strings.Cut(c.text, "\n")
		s := strings.TrimSpace(first)
		if strings.HasPrefix(first, "---") {
			s = strings.TrimSpace(first[3:])
		}
		if !more || s != "" && s[0] != '#' {
			return c
		}
		c.text, c.line = rest, c.line+1
	}
}

// located is an error at a line of a file.
type located struct {
	line int
	err  error
}

// parseChunk returns the documents of a chunk: one, or more if "..." parts
// them. Lines in the nodes count from the beginning of the chunk. What the
// YAML library cannot take, including by a panic, is an error.
func parseChunk(c chunk) (docs []*yaml.Node, bad *located) {
	defer func() {
		if r := recover(); r != nil {
			docs, bad = nil, &located{c.line, fmt.Errorf("the YAML cannot be read: %v", r)}
		}
	}()
	dec := yaml.NewDecoder(strings.NewReader(c.text))
	for {
		var n yaml.Node
		err := dec.Decode(&n)
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			line, cause := yamlErrorLine(err)
			if line > 0 {
				line = c.line + line - 1
			} else {
				line = c.line
			}
			return docs, &located{line, fmt.Errorf("not valid YAML: %s: mend the syntax of this document", cause)}
		}
		if len(n.Content) == 1 && !isNull(n.Content[0]) {
			docs = append(docs, n.Content[0])
		}
	}
}

// yamlErrorLine takes the line out of an error of the YAML library, which
// writes "yaml: line 3: cause".
func yamlErrorLine(err error) (int, string) {
	cause := strings.TrimPrefix(err.Error(), "yaml: ")
	if rest, ok := strings.CutPrefix(cause, "line "); ok {
		if num, after, ok := strings.Cut(rest, ": "); ok {
			if line, err := strconv.Atoi(num); err == nil {
				return line, after
			}
		}
	}
	return 0, cause
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// member returns the value of a mapping's key, nil if there is none.
func member(n *yaml.Node, name string) *yaml.Node {
	n = resolve(n)
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == name {
			return resolve(n.Content[i+1])
		}
	}
	return nil
}

func resolve(n *yaml.Node) *yaml.Node {
	for range maxDepth {
		if n == nil || n.Kind != yaml.AliasNode {
			return n
		}
		n = n.Alias
	}
	return nil
}

// text returns the scalar string at a path of keys, "" if there is none.
func text(n *yaml.Node, path ...string) string {
	for _, name := range path {
		n = member(n, name)
	}
	if n == nil || n.Kind != yaml.ScalarNode || isNull(n) {
		return ""
	}
	return n.Value
}

// jsonDoc is a YAML node written as JSON, and for each value where it stood.
type jsonDoc struct {
	buf   bytes.Buffer
	marks []mark
	bad   []located // faults that do not keep the rest from being written
}

type mark struct{ offset, line int }

// toJSON writes a node as the JSON that the Kubernetes tools would make of it:
// plain yes, no, on and off are booleans as in YAML 1.1, keys are strings.
func toJSON(n *yaml.Node) (*jsonDoc, *located) {
	d := &jsonDoc{}
	if bad := d.write(n, 0); bad != nil {
		return nil, bad
	}
	return d, nil
}

// lineAt returns the line of the value that covers an offset.
func (d *jsonDoc) lineAt(offset int) int {
	i := sort.Search(len(d.marks), func(i int) bool { return d.marks[i].offset > offset })
	if i == 0 {
		return 0
	}
	return d.marks[i-1].line
}

func (d *jsonDoc) write(n *yaml.Node, depth int) *located {
	if depth > maxDepth {
		return &located{n.Line, fmt.Errorf("nested more than %d levels deep, or an anchor contains itself: write it out flat", maxDepth)}
	}
	if d.buf.Len() > maxJSON {
		return &located{n.Line, fmt.Errorf("larger than %d MiB with its aliases written out: split it", maxJSON>>20)}
	}
	if n.Kind != yaml.AliasNode {
		d.marks = append(d.marks, mark{d.buf.Len(), n.Line})
	}
	switch n.Kind {
	case yaml.AliasNode:
		return d.write(n.Alias, depth+1)
	case yaml.SequenceNode:
		d.buf.WriteByte('[')
		for i, item := range n.Content {
			if i > 0 {
				d.buf.WriteByte(',')
			}
			if bad := d.write(item, depth+1); bad != nil {
				return bad
			}
		}
		d.buf.WriteByte(']')
		return nil
	case yaml.MappingNode:
		return d.writeMapping(n, depth)
	case yaml.ScalarNode:
		return d.writeScalar(n)
	}
	return &located{n.Line, fmt.Errorf("an unexpected piece of YAML (kind %d): write a mapping, a list or a value", n.Kind)}
}

func (d *jsonDoc) writeMapping(n *yaml.Node, depth int) *located {
	pairs, bad := d.pairs(n, depth)
	if bad != nil {
		return bad
	}
	d.buf.WriteByte('{')
	for i, p := range pairs {
		if i > 0 {
			d.buf.WriteByte(',')
		}
		d.marks = append(d.marks, mark{d.buf.Len(), p.key.Line})
		d.writeString(p.name)
		d.buf.WriteByte(':')
		if bad := d.write(p.value, depth+1); bad != nil {
			return bad
		}
	}
	d.buf.WriteByte('}')
	return nil
}

type pair struct {
	name       string
	key, value *yaml.Node
}

// pairs lists a mapping's keys and values with its merge keys applied: what
// the mapping says itself wins over what it merges.
func (d *jsonDoc) pairs(n *yaml.Node, depth int) ([]pair, *located) {
	if depth > maxDepth {
		return nil, &located{n.Line, errors.New("merge keys nested too deep, or one that merges itself: write the fields out")}
	}
	var own, merged []pair
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := resolve(n.Content[i]), n.Content[i+1]
		if key == nil || key.Kind != yaml.ScalarNode || isNull(key) {
			return nil, &located{n.Content[i].Line, errors.New("a key that is not a plain value: write a name")}
		}
		if key.ShortTag() == "!!merge" {
			sources := []*yaml.Node{value}
			if v := resolve(value); v != nil && v.Kind == yaml.SequenceNode {
				sources = v.Content
			}
			for _, s := range sources {
				s := resolve(s)
				if s == nil || s.Kind != yaml.MappingNode {
					return nil, &located{value.Line, errors.New("a merge key (<<) takes a mapping or a list of mappings")}
				}
				more, bad := d.pairs(s, depth+1)
				if bad != nil {
					return nil, bad
				}
				merged = append(merged, more...)
			}
			continue
		}
		if seen[key.Value] {
			d.bad = append(d.bad, located{n.Content[i].Line, fmt.Errorf("field %q stands twice: remove one", key.Value)})
			continue
		}
		seen[key.Value] = true
		own = append(own, pair{key.Value, n.Content[i], value})
	}
	for _, p := range merged {
		if !seen[p.name] {
			seen[p.name] = true
			own = append(own, p)
		}
	}
	return own, nil
}

func (d *jsonDoc) writeString(s string) {
	b, err := json.Marshal(s)
	if err != nil { // a string cannot fail
		panic(err)
	}
	d.buf.Write(b)
}

func (d *jsonDoc) writeScalar(n *yaml.Node) *located {
	plain := n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle|yaml.TaggedStyle) == 0
	if plain {
		switch n.Value {
		case "y", "Y", "yes", "Yes", "YES", "on", "On", "ON":
			d.buf.WriteString("true")
			return nil
		case "n", "N", "no", "No", "NO", "off", "Off", "OFF":
			d.buf.WriteString("false")
			return nil
		}
	}
	switch tag := n.ShortTag(); tag {
	case "!!null":
		d.buf.WriteString("null")
	case "!!str", "!!timestamp":
		d.writeString(n.Value)
	case "!!bool", "!!int", "!!float":
		var v any
		if err := n.Decode(&v); err != nil {
			return &located{n.Line, fmt.Errorf("%q is not a value of type %s", n.Value, tag[2:])}
		}
		switch v := v.(type) {
		case bool:
			d.buf.WriteString(strconv.FormatBool(v))
		case int:
			d.buf.WriteString(strconv.Itoa(v))
		case int64:
			d.buf.WriteString(strconv.FormatInt(v, 10))
		case uint64:
			d.buf.WriteString(strconv.FormatUint(v, 10))
		case float64:
			if math.IsNaN(v) || math.IsInf(v, 0) {
				return &located{n.Line, fmt.Errorf("%s is no number that a field can hold", n.Value)}
			}
			b, err := json.Marshal(v)
			if err != nil {
				return &located{n.Line, err}
			}
			d.buf.Write(b)
		default:
			d.writeString(n.Value)
		}
	case "!!binary":
		d.writeString(n.Value)
	default:
		return &located{n.Line, fmt.Errorf("the tag %s means nothing here: remove it", n.Tag)}
	}
	return nil
}
