package reconcile

// Array makes a store of an array map, in which every key exists at all
// times: an entry of the zero value counts as absent.
func Array[K comparable, V comparable](store Store[K, V]) Store[K, V] {
	return array[K, V]{store}
}

type array[K comparable, V comparable] struct {
	Store[K, V]
}

func (a array[K, V]) Dump() (map[K]V, error) {
	all, err := a.Store.Dump()
	if err != nil {
		return nil, err
	}
	var zero V
	out := make(map[K]V)
	for k, v := range all {
		if v != zero {
			out[k] = v
		}
	}
	return out, nil
}

func (a array[K, V]) TryDeleteAll(keys []K) map[K]error {
	zeros := make(map[K]V, len(keys))
	var zero V
	for _, k := range keys {
		zeros[k] = zero
	}
	return a.TryPutAll(zeros)
}
