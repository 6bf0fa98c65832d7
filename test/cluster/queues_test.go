package cluster

import (
	"fmt"
	"net"
	"testing"
)

func TestSoftnetDrops(t *testing.T) {
	for text, want := range map[string]string{
		"0030 0000 0001\n003d 0000001f 0000\n": "31",
		"0030 00000002\n":                      "2",
		"":                                     "0",
		"0030\n":                               "error",
		"0030 word\n":                          "error",
	} {
		n, err := softnetDrops([]byte(text))
		got := fmt.Sprint(n)
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestSNMP(t *testing.T) {
	got := map[string]uint64{}
	parseSNMP([]byte("Ip: Forwarding InReceives\nIp: 1 7\nUdp: InDatagrams RcvbufErrors\nUdp: 5 -1\nUdpLite: RcvbufErrors\nUdpLite: 9\n"), got)
	parseSNMP([]byte("Udp6InErrors                    \t3\nUdp6RcvbufErrors\t4\n"), got)
	if got["Ip:InReceives"] != 7 || got["UdpLite:RcvbufErrors"] != 9 || got["Udp:InDatagrams"] != 5 || got["Udp:RcvbufErrors"] != 0 || got["Udp6RcvbufErrors"] != 4 {
		t.Errorf("%v", got)
	}
}

// What a socket of the cluster has no room for is counted, to the datagram.
func TestOverflows(t *testing.T) {
	c := ForTest(t, Config{Nodes: DefaultNodes()[:1]})
	before, err := c.overflows()
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		err := c.Ext.Do(func() error {
			deaf, err := net.ListenPacket("udp", addr)
			if err != nil {
				return err
			}
			defer deaf.Close()
			if err := deaf.(*net.UDPConn).SetReadBuffer(1); err != nil { // the least there is
				return err
			}
			to, err := net.Dial("udp", deaf.LocalAddr().String())
			if err != nil {
				return err
			}
			defer to.Close()
			for range 100 {
				if _, err := to.Write(make([]byte, 1000)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	after, err := c.overflows()
	if err != nil {
		t.Fatal(err)
	}
	got, err := c.Ext.SNMP()
	if err != nil {
		t.Fatal(err)
	}
	if n := got["Udp:RcvbufErrors"] + got["Udp6RcvbufErrors"]; n < 100 || after-before < n {
		t.Errorf("%d overflows, of which the sockets here had %d of 200", after-before, n)
	}
}
