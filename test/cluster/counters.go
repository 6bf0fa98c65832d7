package cluster

// Since is what counters have gone up by between two readings: those that moved.
func Since[M ~map[K]V, K comparable, V int | uint64](now, before M) M {
	out := M{}
	for k, v := range now {
		if v != before[k] {
			out[k] = v - before[k]
		}
	}
	return out
}
