package service

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The order of slices, endpoints and ports of slices never shows.
func TestOrderDoesNotMatter(t *testing.T) {
	docs := []string{basic, `
addressType: IPv4
ports: [{port: 8081}, {port: 8082}, {}]
endpoints:
- {addresses: [10.244.80.66], conditions: {ready: false, serving: true, terminating: true}}
- {addresses: [10.244.80.70], hints: {forZones: [{name: east}]}}
`, `
addressType: IPv4
ports: [{port: 8081}]
endpoints:
- {addresses: [10.244.80.66]}
- {addresses: [10.244.80.70], conditions: {ready: false}}
`, "addressType: FQDN"}
	all := manifest(t, docs...)
	want, wantErr := Compile(svc(), all, Node{Zone: "east"})
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		shuffled := slices.Clone(all)
		r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		before := slices.Clone(shuffled)
		got, err := Compile(svc(), shuffled, Node{Zone: "east"})
		if d := cmp.Diff(describe(want), describe(got)); d != "" {
			t.Fatalf("(-want +got)\n%s", d)
		}
		if err.Error() != wantErr.Error() {
			t.Fatalf("errors in another order:\n%v\n%v", err, wantErr)
		}
		if !slices.Equal(before, shuffled) {
			t.Fatal("the argument was changed")
		}
	}
}

func BenchmarkCompile5000Endpoints(b *testing.B) {
	var all []*discoveryv1.EndpointSlice
	for i := range 50 {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("web-%d", i)},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Port: new(int32(8080))}},
		}
		for j := range 100 {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.244.%d.%d", i, j)}})
		}
		all = append(all, s)
	}
	for b.Loop() {
		if c, err := Compile(svc(), all, Node{}); err != nil || len(c.Ports[0].Internal) != 5000 {
			b.Fatal(err)
		}
	}
}
