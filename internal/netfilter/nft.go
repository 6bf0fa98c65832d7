package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Rule is what is read of a rule of nf_tables.
type Rule struct {
	Chain  string
	Handle []byte // as the kernel writes it
	Leads  []string
}

var families = map[string]uint8{"ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6, "inet": unix.NFPROTO_INET}

// Family is the kernel's number of one.
func Family(name string) uint8 { return families[name] }

func familyName(n uint8) string {
	for name, v := range families {
		if v == n {
			return name
		}
	}
	return ""
}

// kindOf: tables of these names and families are those that iptables keeps.
func kindOf(family, table string) string {
	if family != "inet" && slices.Contains([]string{"raw", "mangle", "nat", "filter", "security"}, table) {
		return IPTablesNFT
	}
	return NFTables
}

// ReadNFT reads the tables of nf_tables with their chains.
func ReadNFT() (out []Table, err error) {
	err = dumpNFT(unix.NFT_MSG_GETTABLE, unix.NFPROTO_UNSPEC, nil, func() { out = nil }, func(family string, attrs map[uint16][]byte) {
		name := text(attrs[unix.NFTA_TABLE_NAME])
		out = append(out, Table{Kind: kindOf(family, name), Family: family, Name: name})
	})
	if err != nil {
		return nil, fmt.Errorf("tables of nf_tables: %w", err)
	}
	chains, err := nftChains()
	if err != nil {
		return nil, err
	}
	for _, c := range chains {
		// A table that was made meanwhile is seen the next time.
		i := slices.IndexFunc(out, func(t Table) bool { return t.Family == c.family && t.Name == c.table })
		if i >= 0 {
			out[i].Chains = append(out[i].Chains, c.name)
		}
	}
	sortTables(out)
	return out, nil
}

type nftChain struct{ family, table, name string }

func nftChains() (out []nftChain, err error) {
	err = dumpNFT(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_UNSPEC, nil, func() { out = nil }, func(family string, attrs map[uint16][]byte) {
		out = append(out, nftChain{family, text(attrs[unix.NFTA_CHAIN_TABLE]), text(attrs[unix.NFTA_CHAIN_NAME])})
	})
	if err != nil {
		return nil, fmt.Errorf("chains of nf_tables: %w", err)
	}
	return out, nil
}

// ReadRules reads the rules of a table of nf_tables.
func ReadRules(family, table string) (out []Rule, err error) {
	filter := nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(table))
	err = dumpNFT(unix.NFT_MSG_GETRULE, families[family], filter, func() { out = nil }, func(of string, attrs map[uint16][]byte) {
		if of == family && text(attrs[unix.NFTA_RULE_TABLE]) == table {
			out = append(out, Rule{text(attrs[unix.NFTA_RULE_CHAIN]), attrs[unix.NFTA_RULE_HANDLE], leadsTo(attrs[unix.NFTA_RULE_EXPRESSIONS])})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("rules of table %s %s: %w", family, table, err)
	}
	return out, nil
}

// leadsTo are the chains that a rule's verdicts name.
func leadsTo(expressions []byte) (out []string) {
	for _, e := range attributes(expressions) {
		expr := byType(e.data)
		if text(expr[unix.NFTA_EXPR_NAME]) != "immediate" {
			continue
		}
		data := byType(byType(expr[unix.NFTA_EXPR_DATA])[unix.NFTA_IMMEDIATE_DATA])
		if name := text(byType(data[unix.NFTA_DATA_VERDICT])[unix.NFTA_VERDICT_CHAIN]); name != "" {
			out = append(out, name)
		}
	}
	return out
}

// dumpTries is how often a list is asked for that changed while it was read.
const dumpTries = 5

// dumpNFT asks for a list. again is called before each try, take with each
// object of a family that we know. A kernel without nf_tables has none.
func dumpNFT(message int, family uint8, filter *nl.RtAttr, again func(), take func(family string, attrs map[uint16][]byte)) error {
	var err error
	for range dumpTries {
		again()
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|message, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: family})
		if filter != nil {
			req.AddData(filter)
		}
		err = req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
			if len(msg) < nl.SizeofNfgenmsg {
				return true
			}
			if name := familyName(msg[0]); name != "" {
				take(name, byType(msg[nl.SizeofNfgenmsg:]))
			}
			return true
		})
		if !errors.Is(err, nl.ErrDumpInterrupted) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL):
		return nil // what the kernel says that does not have it
	case errors.Is(err, unix.ENOENT) && filter != nil:
		return nil // the table has gone
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: CAP_NET_ADMIN is needed", err)
	}
	return err
}

type attribute struct {
	kind uint16
	data []byte
}

// attributes takes netlink attributes apart; what follows a broken one is lost.
func attributes(b []byte) (out []attribute) {
	for len(b) >= nl.SizeofNfattr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < nl.SizeofNfattr || size > len(b) {
			return out
		}
		out = append(out, attribute{binary.NativeEndian.Uint16(b[2:]) & nl.NLA_TYPE_MASK, b[nl.SizeofNfattr:size]})
		b = b[min((size+3)&^3, len(b)):]
	}
	return out
}

func byType(b []byte) map[uint16][]byte {
	out := make(map[uint16][]byte)
	for _, a := range attributes(b) {
		out[a.kind] = a.data
	}
	return out
}

func text(b []byte) string { return unix.ByteSliceToString(b) }
