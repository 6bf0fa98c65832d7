package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/podweir/podweir/internal/api"
	"github.com/podweir/podweir/internal/maps"
)

// The numbers of an event get the names that they have in force.
func TestEventNames(t *testing.T) {
	b := newAgentBench(t)
	b.cluster()
	client := testPod("client", "node-a", "", map[string]string{"app": "client"})
	b.put(client, testPod("web", "node-b", "10.244.158.70", nil))
	txn := b.tables.DB.WriteTxn(b.tables.Policies)
	_, _, err := b.tables.Policies.Insert(txn, testPolicy("only-frontends", "client", "frontend"))
	txn.Commit()
	if err != nil {
		t.Fatal(err)
	}
	b.done()
	ep := testEndpoint("client", "uid-client", "10.244.80.65")
	if err := b.a.eps.Up(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	pol, err := b.a.Policy(t.Context())
	if err != nil || len(pol.Rules) != 1 {
		t.Fatalf("%+v, %v", pol, err)
	}
	var rule uint32
	for rule = range pol.Rules {
	}
	web, own := ip("10.244.158.70"), ip("10.244.80.65")
	now, err := monotonic()
	if err != nil {
		t.Fatal(err)
	}
	ev := maps.Event{
		Time: uint64(now - time.Minute), Reason: uint32(maps.ReasonPolicyIngress), Hook: 4, Table: 3, SrcIdentity: 4,
		Key: maps.FlowKey{Src: web, Dst: own, Sport: 40000, Dport: 80, Proto: maps.ProtoTCP},
		Src: web, Dst: own, Dport: 80, From: maps.Place{Kind: maps.PlaceNode, Id: 1},
	}
	describe := func(ev maps.Event) api.Event {
		t.Helper()
		out, err := b.a.describeEvent(t.Context(), ev)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	got := describe(ev)
	if age := time.Since(got.Time); age < time.Minute || age > 2*time.Minute {
		t.Errorf("%v old, want a minute", age)
	}
	src := api.EventEnd{Pod: "default/web", Addr: maps.FromAddr(web), Port: 40000}
	dst := api.EventEnd{Pod: "default/client", Addr: maps.FromAddr(own), Port: 80}
	want := api.Event{
		Reason: "drop_policy_ingress", Hook: "from_overlay", Protocol: "tcp", Source: src, Destination: dst, From: "node", Table: 3,
		Policies: []string{"default/only-frontends"}, Text: "isolated by default/only-frontends, no rule allows",
		Denied: &api.Denial{Direction: "ingress", Pod: "default/client", PeerIdentity: 4, Source: api.EventEnd{Pod: src.Pod, Addr: src.Addr}, Destination: dst},
	}
	same := func(what string, want, got api.Event) {
		t.Helper()
		if d := cmp.Diff(want, got, cmpopts.IgnoreFields(api.Event{}, "Time"), cmpopts.EquateComparable(src.Addr)); d != "" {
			t.Errorf("%s: (-want +got)\n%s", what, d)
		}
	}
	same("isolated", want, got)

	ev.Rule = rule
	want.RuleID, want.Rule, want.Policies = rule, "default/only-frontends ingress[0]", nil
	want.Text = "denied by default/only-frontends ingress[0]"
	same("denied by a rule", want, describe(ev))

	ev.Reason, ev.From, ev.Rule, ev.Table = uint32(maps.Reason(37)), maps.Place{Kind: maps.PlacePod, Id: uint32(ep.HostIfindex)}, 0, 0
	same("a false source", api.Event{
		Reason: "drop_spoofed_source", Hook: "from_overlay", Protocol: "tcp", Source: src, Destination: dst, From: "pod", Sender: "default/client",
	}, describe(ev))
}

// A listener that does not read costs the others nothing, and is told how
// much it missed; all of them end with the agent.
func TestListeners(t *testing.T) {
	e := newEvents(nil)
	slow, leave := e.listen()
	quick, _ := e.listen()
	const missed = 5
	for range eventQueue + missed {
		e.publish(api.Event{Reason: "x"})
		if ev := <-quick; ev.Missed != 0 {
			t.Fatalf("the listener that reads missed %d", ev.Missed)
		}
	}
	for range eventQueue {
		if ev := <-slow; ev.Missed != 0 {
			t.Fatalf("told of %d missed too early", ev.Missed)
		}
	}
	for _, want := range []uint64{missed, 0} {
		e.publish(api.Event{})
		if ev := <-slow; ev.Missed != want {
			t.Errorf("told of %d missed, want %d", ev.Missed, want)
		}
		<-quick
	}
	leave()
	if e.publish(api.Event{}); len(slow) != 0 || len(quick) != 1 {
		t.Errorf("queues of %d and %d after one has left", len(slow), len(quick))
	}
	<-quick
	e.end()
	if _, ok := <-quick; ok {
		t.Error("the queue goes on after the end")
	}
	if late, _ := e.listen(); len(late) != 0 {
		t.Error("a late listener has events")
	} else if _, ok := <-late; ok {
		t.Error("a late listener waits for ever")
	}
	leave() // once more, after the end
}

// Over HTTP: a line each as they come, to the end of the agent or of the
// listener.
func TestEventStream(t *testing.T) {
	e := newEvents(nil)
	srv := httptest.NewServer(e)
	t.Cleanup(srv.Close)
	open := func(ctx context.Context) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, srv.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	ctx, cancel := context.WithCancel(t.Context())
	open(ctx)
	stays := bufio.NewScanner(open(t.Context()).Body)
	next := func(want string) {
		t.Helper()
		var ev api.Event
		e.publish(api.Event{Reason: want})
		if !stays.Scan() || json.Unmarshal(stays.Bytes(), &ev) != nil || ev.Reason != want {
			t.Fatalf("read %q, %v; want %s", stays.Text(), stays.Err(), want)
		}
	}
	next("one")
	cancel()
	next("two")
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		e.mu.Lock()
		left := len(e.listeners)
		e.mu.Unlock()
		if left == 1 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("%d listeners after one has gone", left)
		}
	}
	e.end()
	if stays.Scan() {
		t.Errorf("after the end: %q", stays.Text())
	}
}
