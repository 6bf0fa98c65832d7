package service

import (
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/podweir/podweir/internal/maps"
)

// An endpoint in a table: a name and words for its state.
//
//	r ready, d draining, N=node, n=node hint, z=zone hint
func parseEndpoint(t *testing.T, s string) Endpoint {
	t.Helper()
	words := strings.Fields(s)
	e := Endpoint{Backend: maps.Backend{Port: uint16(words[0][0])}}
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "r":
			e.Ready = true
		case "d":
			e.Draining = true
		case "N":
			e.Node = value
		case "n":
			e.NodeHints = append(e.NodeHints, value)
		case "z":
			e.ZoneHints = append(e.ZoneHints, value)
		default:
			t.Fatalf("word %q in %q", w, s)
		}
	}
	return e
}

func TestChoose(t *testing.T) {
	self := Node{Name: "a", Zone: "east"}
	tests := []struct {
		name      string
		scope     Scope
		node      Node
		endpoints []string
		want      string
	}{
		{"none", Cluster, self, nil, ""},
		{"only ready ones", Cluster, self, []string{"1 r", "2", "3 r", "4 d"}, "13"},
		{"none ready: draining ones", Cluster, self, []string{"1", "2 d", "3 d"}, "23"},
		{"neither", Cluster, self, []string{"1", "2"}, ""},
		{"ready and draining is ready", Cluster, self, []string{"1 r d", "2 d"}, "1"},

		{"node hints name this node", Cluster, self, []string{"1 r n=a", "2 r n=b"}, "1"},
		{"node hints, several for one", Cluster, self, []string{"1 r n=b n=a", "2 r n=b"}, "1"},
		{"node hints name others only", Cluster, self, []string{"1 r n=b", "2 r n=c"}, "12"},
		{"a ready one without node hints", Cluster, self, []string{"1 r n=a", "2 r"}, "12"},
		{"an unready one without node hints", Cluster, self, []string{"1 r n=a", "2", "3 r n=b"}, "1"},
		{"node hints before zone hints", Cluster, self, []string{"1 r n=a z=east", "2 r n=b z=east", "3 r n=c z=west"}, "1"},
		{"node hints elsewhere: zone hints", Cluster, self, []string{"1 r n=b z=east", "2 r n=c z=west"}, "1"},
		{"node hints partial: zone hints", Cluster, self, []string{"1 r n=a z=east", "2 r z=east", "3 r z=west"}, "12"},
		{"zone hints", Cluster, self, []string{"1 r z=west", "2 r z=east", "3 r z=east"}, "23"},
		{"zone hints name others only", Cluster, self, []string{"1 r z=west"}, "1"},
		{"a ready one without zone hints", Cluster, self, []string{"1 r z=east", "2 r"}, "12"},
		{"zone of this node unknown", Cluster, Node{Name: "a"}, []string{"1 r z=east", "2 r z="}, "12"},
		{"draining ones ignore hints", Cluster, self, []string{"1 d n=b z=west", "2 d n=a z=east"}, "12"},
		{"hinted ones unready: the other ready ones", Cluster, self, []string{"1 n=a z=east", "2 r n=b z=west"}, "2"},

		{"local", Local, self, []string{"1 r N=a", "2 r N=b", "3 r"}, "1"},
		{"local, none here", Local, self, []string{"2 r N=b"}, ""},
		{"local falls back on its own", Local, self, []string{"1 d N=a", "2 r N=b", "3 d N=b"}, "1"},
		{"local ignores hints", Local, self, []string{"1 r N=a n=b z=west", "2 r N=b n=a z=east"}, "1"},
		{"local, this node has no name", Local, Node{}, []string{"1 r"}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var in []Endpoint
			for _, s := range tt.endpoints {
				in = append(in, parseEndpoint(t, s))
			}
			var got string
			for _, e := range Choose(in, tt.scope, tt.node) {
				got += string(rune(e.Backend.Port))
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestConditions(t *testing.T) {
	yes, no := new(true), new(false)
	tests := []struct {
		name                        string
		ready, serving, terminating *bool
		publish                     bool
		wantReady, wantDraining     bool
	}{
		{name: "nothing said", wantReady: true},
		{name: "ready", ready: yes, wantReady: true},
		{name: "not ready", ready: no},
		{name: "not ready, terminating: serving is what ready is", ready: no, terminating: yes},
		{name: "not ready, serving, terminating", ready: no, serving: yes, terminating: yes, wantDraining: true},
		{name: "not ready, serving", ready: no, serving: yes},
		{name: "not serving, terminating", ready: no, serving: no, terminating: yes},
		{name: "terminating, ready unsaid", terminating: yes, wantReady: true, wantDraining: true},
		{name: "published before ready", ready: no, publish: true, wantReady: true},
		{name: "published while terminating", ready: no, serving: no, terminating: yes, publish: true, wantReady: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := discoveryv1.EndpointConditions{Ready: tt.ready, Serving: tt.serving, Terminating: tt.terminating}
			ready, draining, serving := conditions(c, tt.publish)
			if ready != tt.wantReady || draining != tt.wantDraining {
				t.Errorf("got ready %v draining %v, want %v %v", ready, draining, tt.wantReady, tt.wantDraining)
			}
			if want := ready || draining || tt.serving != nil && *tt.serving; serving != want {
				t.Errorf("serving %v, want %v", serving, want)
			}
		})
	}
}
