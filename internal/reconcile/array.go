package reconcile

// ArrayStore is the map behind [Array]; [maps.Map] is one.
type ArrayStore[K comparable, V any] interface {
	Store[K, V]
	Each(func(K, V) error) error
}

// Array makes a store of an array map, in which every key exists at all
// times: an entry of the zero value counts as absent.
func Array[K comparable, V comparable](store ArrayStore[K, V]) Store[K, V] {
	return array[K, V]{store}
}

type array[K comparable, V comparable] struct {
	ArrayStore[K, V]
}

func (a array[K, V]) Dump() (map[K]V, error) {
	var zero V
	out := make(map[K]V)
	err := a.Each(func(k K, v V) error {
		if v != zero {
			out[k] = v
		}
		return nil
	})
	if err != nil {
		return nil, err
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
