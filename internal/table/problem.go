package table

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"
)

// Problem is something a person has to mend: a bad manifest, a service that
// cannot be compiled. It stands in the table until it is mended.
type Problem struct {
	Owner  string    `json:"owner"`            // who reported it and will take it back
	Object string    `json:"object,omitempty"` // "Service default/web", or empty
	File   string    `json:"file,omitempty"`
	Line   int       `json:"line,omitempty"`
	Err    string    `json:"error"`
	Since  time.Time `json:"since"`
}

// String is the problem on one line: where, what, why.
func (p *Problem) String() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d", p.Line)
		}
		b.WriteString(": ")
	}
	if p.Object != "" {
		b.WriteString(p.Object + ": ")
	}
	b.WriteString(p.Err)
	return b.String()
}

func (p *Problem) TableHeader() []string {
	return []string{"Owner", "Object", "File", "Line", "Error", "Since"}
}

func (p *Problem) TableRow() []string {
	return []string{p.Owner, p.Object, p.File, strconv.Itoa(p.Line), p.Err, p.Since.Format(time.RFC3339)}
}

// same is what makes a problem the same one as before: its line may move.
func (p *Problem) same() string {
	return strings.Join([]string{p.Owner, p.File, p.Object, p.Err}, "\x00")
}

func (p *Problem) key() string {
	return fmt.Sprintf("%s\x00%09d", p.same(), p.Line)
}

var problemIndex = statedb.Index[*Problem, string]{
	Name:       "key",
	FromObject: func(p *Problem) index.KeySet { return index.NewKeySet(index.String(p.key())) },
	FromKey:    index.String,
	Unique:     true,
}

var problemOwnerIndex = statedb.Index[*Problem, string]{
	Name:       "owner",
	FromObject: func(p *Problem) index.KeySet { return index.NewKeySet(index.String(p.Owner)) },
	FromKey:    index.String,
	FromString: index.FromString,
}

// ProblemsByOwner asks for the problems that an owner reported.
func ProblemsByOwner(owner string) statedb.Query[*Problem] {
	return problemOwnerIndex.Query(owner)
}

// SetProblems replaces all problems of an owner in one transaction. Owner is
// filled in, and so is Since where it is zero: a problem that stood before
// keeps its time, a new one gets the present. What did not change is not
// written, so that nobody is woken for it. It returns the problems that are new
// and those that have gone, for the log.
func (t *Tables) SetProblems(owner string, problems []Problem) (added, gone []*Problem) {
	txn := t.DB.WriteTxn(t.Problems)
	defer txn.Abort()

	since := map[string]time.Time{}
	old := map[string]*Problem{}
	for p := range t.Problems.List(txn, ProblemsByOwner(owner)) {
		old[p.key()] = p
		if at, ok := since[p.same()]; !ok || p.Since.Before(at) {
			since[p.same()] = p.Since
		}
	}
	now := time.Now()
	wanted := map[string]bool{}
	stands := map[string]bool{}
	for i := range problems {
		p := problems[i]
		p.Owner = owner
		if wanted[p.key()] {
			continue
		}
		wanted[p.key()] = true
		stands[p.same()] = true
		if old[p.key()] != nil {
			continue
		}
		if p.Since.IsZero() {
			p.Since = now
			if at, ok := since[p.same()]; ok {
				p.Since = at
			}
		}
		if _, ok := since[p.same()]; !ok {
			added = append(added, &p)
		}
		mustWrite(t.Problems.Insert(txn, &p))
	}
	for key, p := range old {
		if wanted[key] {
			continue
		}
		if !stands[p.same()] {
			gone = append(gone, p)
		}
		mustWrite(t.Problems.Delete(txn, p))
	}
	txn.Commit()
	return added, gone
}

// mustWrite stops on an error of a table write: the only ones are writing to a
// table that is not locked or in a closed transaction, which is a mistake in
// this package.
func mustWrite[Obj any](_ Obj, _ bool, err error) {
	if err != nil {
		panic(fmt.Sprintf("write a table: %v", err))
	}
}
