package endpoint_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/podweir/podweir/internal/endpoint"
)

func mapping(hostIP string, hostPort, containerPort uint16, proto string) endpoint.PortMapping {
	m := endpoint.PortMapping{HostPort: hostPort, ContainerPort: containerPort, Protocol: proto}
	if hostIP != "" {
		m.HostIP = netip.MustParseAddr(hostIP)
	}
	return m
}

// Which of two pods' ports are in each other's way.
func TestPortMappingConflicts(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		first, second endpoint.PortMapping
		conflict      bool
	}{
		{mapping("", 80, 1, "TCP"), mapping("", 80, 2, "TCP"), true},
		{mapping("", 80, 1, "TCP"), mapping("", 80, 1, "UDP"), false},
		{mapping("", 80, 1, "TCP"), mapping("", 81, 1, "TCP"), false},
		{mapping("", 80, 1, "TCP"), mapping("192.0.2.1", 80, 1, "TCP"), true},
		{mapping("::", 80, 1, "TCP"), mapping("", 80, 1, "TCP"), true},
		{mapping("0.0.0.0", 80, 1, "TCP"), mapping("192.0.2.1", 80, 1, "TCP"), true},
		{mapping("0.0.0.0", 80, 1, "TCP"), mapping("2001:db8::1", 80, 1, "TCP"), false},
		{mapping("::", 80, 1, "TCP"), mapping("0.0.0.0", 80, 1, "TCP"), false},
		{mapping("192.0.2.1", 80, 1, "TCP"), mapping("192.0.2.1", 80, 1, "TCP"), true},
		{mapping("192.0.2.1", 80, 1, "TCP"), mapping("192.0.2.2", 80, 1, "TCP"), false},
	} {
		t.Run(c.first.String()+" "+c.second.String(), func(t *testing.T) {
			first, _ := b.request("first")
			first.PortMappings = []endpoint.PortMapping{c.first}
			b.add(first)
			second, _ := b.request("second")
			second.PortMappings = []endpoint.PortMapping{c.second}
			_, err := b.Add(t.Context(), second)
			if c.conflict {
				expectCode(t, err, endpoint.CodeHostPort, "default/first", c.first.String())
			} else if err != nil {
				t.Error(err)
			}
			b.del(first)
			if c.conflict { // what was given up may be had
				b.add(second)
			}
			b.del(second)
			b.expectNothing()
		})
	}
}

func TestBadPortMappings(t *testing.T) {
	b := newBench(t)
	for name, list := range map[string][]endpoint.PortMapping{
		"no host port":     {mapping("", 0, 80, "TCP")},
		"no port of a pod": {mapping("", 80, 0, "TCP")},
		"protocol":         {mapping("", 80, 80, "tcp")},
		"multicast":        {mapping("224.0.0.1", 80, 80, "TCP")},
		"mapped":           {mapping("::ffff:192.0.2.1", 80, 80, "TCP")},
		"contradiction":    {mapping("", 80, 80, "TCP"), mapping("192.0.2.1", 80, 81, "TCP")},
	} {
		t.Run(name, func(t *testing.T) {
			req, _ := b.request("bad")
			req.PortMappings = list
			_, err := b.Add(t.Context(), req)
			expectCode(t, err, endpoint.CodeBadRequest, "port mapping")
		})
	}
	b.expectNothing()
}

// Port mappings come with the endpoint, stay with it over a restart, and
// CHECK compares them.
func TestPortMappingsAreKept(t *testing.T) {
	b := newBench(t)
	req, _ := b.request("web")
	one, two := mapping("", 80, 8080, "TCP"), mapping("fd00::1", 53, 53, "UDP")
	req.PortMappings = []endpoint.PortMapping{one, two, one}
	want := []endpoint.PortMapping{two, one}
	if ep := b.add(req); !slices.Equal(ep.PortMappings, want) {
		t.Errorf("ADD: %v, want %v", ep.PortMappings, want)
	}
	if err := b.restart(); err != nil {
		t.Fatal(err)
	}
	if ep := b.List()[0]; !slices.Equal(ep.PortMappings, want) {
		t.Errorf("after a restart: %v, want %v", ep.PortMappings, want)
	}
	if err := b.Check(t.Context(), req); err != nil {
		t.Error(err)
	}
	req.PortMappings = nil
	if err := b.Check(t.Context(), req); err != nil {
		t.Errorf("without a word about ports: %v", err)
	}
	for _, list := range [][]endpoint.PortMapping{{}, {one}} {
		req.PortMappings = list
		var e *endpoint.Error
		if err := b.Check(t.Context(), req); !errors.As(err, &e) || e.Code != endpoint.CodeDiffers || !strings.Contains(e.Details, one.String()) {
			t.Errorf("CHECK with %v: %v", list, err)
		}
	}
	rival, _ := b.request("rival")
	rival.PortMappings = []endpoint.PortMapping{one}
	_, err := b.Add(t.Context(), rival)
	expectCode(t, err, endpoint.CodeHostPort, "default/web")
	if err := b.GC(t.Context(), "", nil); err != nil {
		t.Fatal(err)
	}
	b.add(rival)
	b.del(rival)
	b.expectNothing()
}
