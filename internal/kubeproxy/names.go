package kubeproxy

import (
	"slices"
	"strings"
)

// OwnChain: is a chain of iptables of this name kube-proxy's, and nobody
// else's? The kubelet's own begin with KUBE- too.
func OwnChain(name string) bool {
	for _, p := range []string{"KUBE-SVC-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SVL-", "KUBE-XLB-", "KUBE-PROXY-"} {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return slices.Contains([]string{
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD",
		// of IPVS mode
		"KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	}, name)
}

// sharedChain: kubelets before 1.28 make these, too. They are no sign of a
// kube-proxy, and go with its others; such a kubelet makes them anew.
func sharedChain(name string) bool {
	return name == "KUBE-POSTROUTING" || name == "KUBE-MARK-MASQ"
}

// KUBE-FIREWALL, which the kubelet makes as well, is none of them: it keeps
// packets of others for 127.0.0.0/8 out, and does nothing to services.
func removable(name string) bool { return OwnChain(name) || sharedChain(name) }
