package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"slices"

	"github.com/podweir/podweir/test/tools/probe"
)

// lookup asks the resolver of /etc/resolv.conf for a name. That a family has no
// address is no failure; that none has is one.
func lookup(ctx context.Context, fs *flag.FlagSet, o *options, args []string) (bool, error) {
	if err := fs.Parse(args); err != nil {
		return false, err
	}
	if fs.NArg() != 1 {
		return false, fmt.Errorf("%s wants one name, got %q", fs.Name(), fs.Args())
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	r := &net.Resolver{PreferGo: true}
	rep := probe.LookupReport{}
	for _, f := range []struct {
		network string
		to      *[]string
	}{{"ip4", &rep.A}, {"ip6", &rep.AAAA}} {
		list, err := r.LookupNetIP(ctx, f.network, fs.Arg(0))
		var none *net.DNSError
		if err != nil && !(errors.As(err, &none) && none.IsNotFound) {
			rep.Error = err.Error()
		}
		for _, a := range list {
			*f.to = append(*f.to, a.Unmap().String())
		}
		slices.Sort(*f.to)
	}
	if name, err := r.LookupCNAME(ctx, fs.Arg(0)); err == nil {
		rep.CNAME = name
	}
	return rep.Error == "" && len(rep.A)+len(rep.AAAA) > 0, print(rep)
}
