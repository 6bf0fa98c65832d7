package doctor

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

// A resolver's answer of any kind will do; silence and a closed port are errors.
func TestAskDNS(t *testing.T) {
	for name, c := range map[string]struct {
		reply func(question []byte) []byte
		want  string
	}{
		"no such name": {func(q []byte) []byte { return append([]byte{q[0], q[1], 0x81, 0x83}, q[4:]...) }, ""},
		"refused":      {func(q []byte) []byte { return append([]byte{q[0], q[1], 0x81, 0x85}, q[4:]...) }, ""},
		"cannot":       {func(q []byte) []byte { return append([]byte{q[0], q[1], 0x81, 0x82}, q[4:]...) }, ""},
		"another's":    {func(q []byte) []byte { return append([]byte{q[0] + 1, q[1], 0x81, 0x80}, q[4:]...) }, "timeout"},
		"an echo":      {func(q []byte) []byte { return q }, "timeout"},
		"short":        {func(q []byte) []byte { return q[:4] }, "timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u, err := net.ListenPacket("udp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer u.Close()
			go func() {
				buf := make([]byte, 512)
				for {
					n, peer, err := u.ReadFrom(buf)
					if err != nil {
						return
					}
					_, _ = u.WriteTo(c.reply(buf[:n]), peer)
				}
			}()
			err = askDNS(t.Context(), netip.MustParseAddrPort(u.LocalAddr().String()), 4711)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
	u, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := netip.MustParseAddrPort(u.LocalAddr().String())
	if err := u.Close(); err != nil {
		t.Fatal(err)
	}
	if err := OSHost("").AskDNS(t.Context(), closed); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a closed port: %v", err)
	}
}

func TestRoute(t *testing.T) {
	if dev, err := OSHost("").Route(netip.MustParseAddr("127.0.0.1")); err != nil || dev != "lo" {
		t.Errorf("127.0.0.1 by %q (%v)", dev, err)
	}
}
