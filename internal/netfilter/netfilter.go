package netfilter

import (
	"errors"
	"slices"
	"strings"
)

// How rules are kept.
const (
	NFTables       = "nftables"
	IPTablesNFT    = "iptables-nft"
	IPTablesLegacy = "iptables-legacy"
)

// Table is one of the node's, of whatever kind.
type Table struct {
	Kind   string // NFTables, IPTablesNFT, IPTablesLegacy
	Family string // ip, ip6, inet
	Name   string
	Chains []string // sorted; of legacy iptables without the kernel's own
}

// Read returns all tables. What was read is right even with an error, which
// names what could not be.
func Read() ([]Table, error) {
	out, err := ReadNFT()
	errs := []error{err}
	for _, f := range legacyFamilies() {
		found, err := f.read()
		errs = append(errs, err)
		out = append(out, found...)
	}
	return out, errors.Join(errs...)
}

func sortTables(list []Table) {
	for _, t := range list {
		slices.Sort(t.Chains)
	}
	slices.SortFunc(list, func(a, b Table) int {
		return strings.Compare(a.Kind+" "+a.Family+" "+a.Name, b.Kind+" "+b.Family+" "+b.Name)
	})
}
