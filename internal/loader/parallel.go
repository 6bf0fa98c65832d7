package loader

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/podweir/podweir/internal/bpf"
)

// loadInto makes the maps, or takes those given or pinned, and loads the programs, as
// many at a time as there are CPUs: most of an agent's start is the verifier's.
func loadInto(spec *ebpf.CollectionSpec, pins string, given map[string]*ebpf.Map, objs *bpf.DpObjects) (err error) {
	cache := btf.NewCache()
	// The load copies the programs it is given; those of all others, copied for
	// each of them, would be the largest part of what a start allocates.
	bare := *spec
	bare.Programs = nil
	only := func(programs map[string]*ebpf.ProgramSpec) *ebpf.CollectionSpec {
		s := bare.Copy()
		s.Programs = programs
		// Filled below: the programs they name are not in this part.
		for _, m := range s.Maps {
			if m.Type == ebpf.ProgramArray {
				m.Contents = nil
			}
		}
		return s
	}
	all, err := ebpf.NewCollectionWithOptions(only(nil), ebpf.CollectionOptions{
		Maps: ebpf.MapOptions{PinPath: pins}, MapReplacements: given, Cache: cache,
	})
	if err != nil {
		return err
	}
	defer all.Close() // what objs has not taken
	var (
		mu   sync.Mutex
		wg   sync.WaitGroup
		free = make(chan struct{}, runtime.GOMAXPROCS(0))
	)
	// The longest first: none of them is left over when the others are done.
	names := slices.SortedFunc(maps.Keys(spec.Programs), func(a, b string) int {
		return cmp.Compare(len(spec.Programs[b].Instructions), len(spec.Programs[a].Instructions))
	})
	for _, name := range names {
		free <- struct{}{}
		wg.Go(func() {
			defer func() { <-free }()
			c, e := ebpf.NewCollectionWithOptions(only(map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}), ebpf.CollectionOptions{
				MapReplacements: all.Maps, Cache: cache,
			})
			mu.Lock()
			defer mu.Unlock()
			if e != nil {
				err = errors.Join(err, e)
				return
			}
			all.Programs[name] = c.DetachProgram(name)
			c.Close()
		})
	}
	wg.Wait()
	if err != nil {
		return err
	}
	for name, m := range spec.Maps {
		if m.Type != ebpf.ProgramArray {
			continue
		}
		for _, kv := range m.Contents {
			if err := all.Maps[name].Put(kv.Key, all.Programs[kv.Value.(string)]); err != nil {
				return fmt.Errorf("fill map %s: %w", name, err)
			}
		}
	}
	return all.Assign(objs)
}
