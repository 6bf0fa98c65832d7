package source

import (
	"fmt"
	"reflect"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/podweir/podweir/internal/table"
)

// store is what a reflector writes to: it trims the objects and puts them into
// a table. What is the same after trimming, such as a node of which only the
// heartbeat changed, is not written.
type store[Obj comparableObject] struct {
	db    *statedb.DB
	table statedb.RWTable[Obj]
	trim  func(Obj) Obj
	done  func(statedb.WriteTxn) // marks the table complete
	// trimmed are the objects of a first list that streams in, until Replace
	// is given them. The reflector calls from one goroutine.
	trimmed map[Obj]struct{}
}

// comparableObject is a pointer to an object.
type comparableObject interface {
	object
	comparable
}

var _ cache.TransformingStore = (*store[*corev1.Pod])(nil)

func (s *store[Obj]) Add(o any) error { return s.Update(o) }

func (s *store[Obj]) Update(o any) error {
	obj, err := s.cast(o)
	if err != nil {
		return err
	}
	txn := s.db.WriteTxn(s.table)
	defer txn.Abort()
	changed, err := s.put(txn, obj)
	if err != nil {
		return err
	}
	if changed {
		txn.Commit()
	}
	return nil
}

func (s *store[Obj]) Delete(o any) error {
	obj, err := s.cast(o)
	if err != nil {
		return err
	}
	txn := s.db.WriteTxn(s.table)
	defer txn.Abort()
	if _, _, err := s.table.Delete(txn, obj); err != nil {
		return fmt.Errorf("delete %s from table %s: %w", table.Key(obj.GetNamespace(), obj.GetName()), s.table.Name(), err)
	}
	txn.Commit()
	return nil
}

// Replace makes the table equal to a full list in one transaction: what
// vanished while nobody was watching goes, and the table is complete.
func (s *store[Obj]) Replace(list []any, _ string) error {
	txn := s.db.WriteTxn(s.table)
	defer txn.Abort()
	listed := make(map[string]bool, len(list))
	for _, o := range list {
		obj, err := s.cast(o)
		if err != nil {
			return err
		}
		listed[table.Key(obj.GetNamespace(), obj.GetName())] = true
		if _, err := s.put(txn, obj); err != nil {
			return err
		}
	}
	s.trimmed = nil
	var gone []Obj
	for obj := range s.table.All(txn) {
		if !listed[table.Key(obj.GetNamespace(), obj.GetName())] {
			gone = append(gone, obj)
		}
	}
	for _, obj := range gone {
		if _, _, err := s.table.Delete(txn, obj); err != nil {
			return fmt.Errorf("delete %s from table %s: %w", table.Key(obj.GetNamespace(), obj.GetName()), s.table.Name(), err)
		}
	}
	s.done(txn)
	txn.Commit()
	return nil
}

// Resync has nothing to do: readers of the tables see every state there is.
func (s *store[Obj]) Resync() error { return nil }

// Transformer lets the reflector trim a first list while it streams in.
func (s *store[Obj]) Transformer() cache.TransformFunc {
	s.trimmed = make(map[Obj]struct{}) // of an attempt that failed, none comes any more
	return func(o any) (any, error) {
		obj, err := s.cast(o)
		if err != nil {
			return nil, err
		}
		obj = s.trim(obj)
		s.trimmed[obj] = struct{}{}
		return obj, nil
	}
}

func (s *store[Obj]) cast(o any) (Obj, error) {
	obj, ok := o.(Obj)
	if !ok {
		return obj, fmt.Errorf("table %s: a %T came in, want %T", s.table.Name(), o, obj)
	}
	return obj, nil
}

func (s *store[Obj]) put(txn statedb.WriteTxn, o Obj) (changed bool, err error) {
	obj := o
	if _, done := s.trimmed[o]; !done {
		obj = s.trim(o)
	}
	name := table.Key(obj.GetNamespace(), obj.GetName())
	old, _, exists := s.table.Get(txn, table.ByName[Obj](obj.GetNamespace(), obj.GetName()))
	if exists {
		version := obj.GetResourceVersion()
		obj.SetResourceVersion(old.GetResourceVersion())
		if reflect.DeepEqual(old, obj) {
			return false, nil
		}
		obj.SetResourceVersion(version)
	}
	if _, _, err := s.table.Insert(txn, obj); err != nil {
		return false, fmt.Errorf("write %s to table %s: %w", name, s.table.Name(), err)
	}
	return true, nil
}
