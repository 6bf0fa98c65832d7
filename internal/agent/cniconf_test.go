package agent

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podweir/podweir/internal/cniinstall"
)

// The configuration is what makes a kubelet send pods: it comes when the agent
// is ready, not before, and stays when the agent ends.
func TestConfigurationWhenReady(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, cniinstall.DefaultConfName)
	there := func() bool {
		_, err := os.Stat(file)
		return err == nil
	}
	if err := os.WriteFile(file, cniinstall.DefaultConf(), 0o600); err != nil {
		t.Fatal(err)
	}
	cni, err := newCNIConf(Config{CNIConfDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	// After a restart of the agent alone nothing is withdrawn.
	if err := cni.withdraw(true, slog.New(slog.DiscardHandler)); err != nil || !there() {
		t.Fatalf("with the dataplane in place: %v, there: %v", err, there())
	}
	if err := cni.withdraw(false, slog.New(slog.DiscardHandler)); err != nil || there() {
		t.Fatalf("without a dataplane: %v, there: %v", err, there())
	}

	b := newAgentBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.a.offer(ctx, cni)
	}()
	b.await("a round", func() bool { return b.a.stats.rounds > 0 })
	if there() {
		t.Error("written before the agent is ready")
	}
	b.cluster()
	b.done()
	b.await("ready", func() bool { return len(b.a.NotReady()) == 0 })
	eventually(t, "written", there)
	cancel()
	<-ended
	if !there() {
		t.Error("gone with the agent")
	}
}

// eventually is for what no round of the loop brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("never: %s", what)
		}
	}
}

// What another plugin has put first is a problem that one sees.
func TestConfigurationOfAnotherFirst(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "05-bridge.conf"), []byte(`{"name": "x", "type": "bridge"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	b := newAgentBench(t)
	b.cluster()
	b.done()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.a.offer(ctx, cniConf{dir: dir})
	}()
	defer func() { cancel(); <-ended }()
	eventually(t, "a problem", func() bool {
		said := false
		err := b.a.do(ctx, func() {
			p := b.a.problems["CNI configuration"]
			said = len(p) == 1 && strings.Contains(p[0].Err, "05-bridge.conf, which sorts before 10-podweir.conflist")
		})
		return err == nil && said
	})
}

func TestConfigurationMistake(t *testing.T) {
	file := filepath.Join(t.TempDir(), "10-mine.conflist")
	for content, want := range map[string]string{
		"{":                              "10-mine.conflist: unexpected end",
		`{"name": "x", "plugins": []}`:   "none of its plugins is podweir-cni",
		string(cniinstall.DefaultConf()): "",
	} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := newCNIConf(Config{CNIConfDir: t.TempDir(), CNIConf: file})
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v, want %q", content, err, want)
		}
	}
}
