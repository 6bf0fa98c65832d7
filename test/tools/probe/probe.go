package probe

import "time"

// Kinds of failure as a client program sees them; [Attempt].Kind.
const (
	Refused     = "refused"     // ECONNREFUSED: a RST or a port unreachable
	Timeout     = "timeout"     // nothing came back in time
	Unreachable = "unreachable" // no route, host or network unreachable
	InUse       = "in use"      // the source port is taken
	Reset       = "reset"       // RST on an established connection
	Other       = "other"
)

// Ready is the first line pw-server prints: it accepts from now on.
type Ready struct {
	Ready bool   `json:"ready"`
	Name  string `json:"name"`
	Port  int    `json:"port"`
}

// Reply is the server's answer to one line (TCP) or datagram (UDP).
type Reply struct {
	Server string `json:"server"`         // the server's -name
	Proto  string `json:"proto"`          // tcp or udp
	Peer   string `json:"peer"`           // the sender as the server saw it
	Local  string `json:"local"`          // the address the packet was sent to, after translation
	Echo   string `json:"echo,omitempty"` // what was received
	Bytes  int64  `json:"bytes,omitempty"`
	CRC32  uint32 `json:"crc32,omitempty"` // of the bytes of a SINK request
}

// Attempt is one exchange as the client saw it.
type Attempt struct {
	OK     bool          `json:"ok"`
	Kind   string        `json:"kind,omitempty"`
	Error  string        `json:"error,omitempty"`
	Local  string        `json:"local,omitempty"`
	Remote string        `json:"remote,omitempty"` // who answered, from the client's side
	Reply  *Reply        `json:"reply,omitempty"`
	Took   time.Duration `json:"took_ns"`
}

// Summary is what "pw-client send" prints: all attempts together, and the
// first success and the first failure in full. "pw-client load" prints one for
// every line on its standard input, and one at the end.
type Summary struct {
	Attempts int            `json:"attempts"`
	OK       int            `json:"ok"`
	Failed   map[string]int `json:"failed,omitempty"`  // per kind
	Servers  map[string]int `json:"servers,omitempty"` // per server name
	Peers    map[string]int `json:"peers,omitempty"`   // per client address as servers saw it
	First    *Attempt       `json:"first,omitempty"`
	Failure  *Attempt       `json:"failure,omitempty"`
	Final    bool           `json:"final,omitempty"`      // load: the last one
	Took     time.Duration  `json:"took_ns,omitempty"`    // load: since it began
	Longest  time.Duration  `json:"longest_ns,omitempty"` // load: the slowest attempt
}

// StreamReport is what "pw-client stream" prints: once after the first
// reply, once for every line on its standard input, once at the end.
type StreamReport struct {
	Final       bool          `json:"final"`
	Sent        uint64        `json:"sent"`
	Received    uint64        `json:"received"`
	Lost        uint64        `json:"lost"` // sent before the last one received, and never answered
	Overflowed  uint64        `json:"-"`    // not among Lost: queues of the machine, shared by all tests, had no room
	Duplicate   uint64        `json:"duplicate"`
	Retransmits uint64        `json:"retransmits"`   // TCP segments, from TCP_INFO
	Spurious    uint64        `json:"spurious"`      // of these, what the receiver had already (DSACK): a timer ran early, nothing was lost
	LastReply   time.Duration `json:"last_reply_ns"` // time since
	MaxGap      time.Duration `json:"max_gap_ns"`    // longest time between two replies
	Servers     []string      `json:"servers"`
	Server      string        `json:"server"` // who gave the last answer
	Local       string        `json:"local"`
	Remote      string        `json:"remote"`
	Error       string        `json:"error,omitempty"`
	Kind        string        `json:"kind,omitempty"`
}

// BulkReport is what "pw-client bulk" prints.
type BulkReport struct {
	Bytes       int64         `json:"bytes"`
	CRCMatches  bool          `json:"crc_matches"`
	Took        time.Duration `json:"took_ns"`
	Retransmits uint64        `json:"retransmits"`
	MSS         uint32        `json:"mss"`
	Error       string        `json:"error,omitempty"`
	Kind        string        `json:"kind,omitempty"`
}

// PingReport is what "pw-client ping" prints.
type PingReport struct {
	Sent     int    `json:"sent"`
	Received int    `json:"received"`
	From     string `json:"from,omitempty"` // source of the last reply
	ICMP     string `json:"icmp,omitempty"` // the last ICMP error, if any
}

// LookupReport is what "pw-client lookup" prints: addresses, sorted, and the
// name that has them.
type LookupReport struct {
	A     []string `json:"a,omitempty"`
	AAAA  []string `json:"aaaa,omitempty"`
	CNAME string   `json:"cname,omitempty"`
	Error string   `json:"error,omitempty"`
}

// Call is one line that "pw-client calls" reads: some exchanges to make, or
// one that was asked for and is to be given up.
type Call struct {
	ID          int           `json:"id"`
	Cancel      bool          `json:"cancel,omitempty"`
	Proto       string        `json:"proto"`
	Target      string        `json:"target"`
	Source      string        `json:"source,omitempty"` // address, default the kernel's choice
	SPort       int           `json:"sport,omitempty"`
	Unconnected bool          `json:"unconnected,omitempty"` // UDP by a socket that is not connected
	Count       int           `json:"count,omitempty"`       // default 1; silence ends the call
	Servers     int           `json:"servers,omitempty"`     // go on until so many have answered,
	Most        int           `json:"most,omitempty"`        // at most for so many exchanges
	Timeout     time.Duration `json:"timeout"`
}

// CallResult is what "pw-client calls" prints when a call is over.
type CallResult struct {
	ID       int       `json:"id"`
	Attempts []Attempt `json:"attempts"`
}
