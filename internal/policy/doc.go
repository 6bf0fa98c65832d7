// Package policy compiles NetworkPolicy and ClusterNetworkPolicy objects
// (networking.k8s.io/v1, policy.networking.k8s.io/v1beta1) into the verdict
// entries the datapath looks up. It is pure: objects in, entries out; it never
// touches the kernel or a client.
//
// # What an answer looks like
//
// A verdict is asked per direction: for a pod of this node, about a peer
// address, a protocol and a port. The datapath finds the peer's identity
// (exact address first, then the longest prefix), the pod's table of that
// direction, and probes {PORT, port}, {CLASS, class of the port}, {ANY}; the
// first entry is the answer, none is a denial. Table 0 is a pod that no
// policy is about in that direction: everything is allowed.
//
// Tiers, priorities, Accept, Deny and Pass are resolved here: for each
// identity, an entry where the decision is another than that of the next
// probe. What ClusterNetworkPolicies and the end of all tiers make of most
// identities is the table's default, one entry of the kind DEFAULT, for which
// the datapath looks only in tables that have it (maps.TableDefault): a
// policy for the whole cluster costs no entry per identity, and a new identity
// that it does not single out changes no table. Tables of NetworkPolicies
// alone have none.
//
// An identity is a class of addresses that the policies in force cannot tell
// apart: same kind (world, this node, another node, pod), same peer selectors
// matched (of a node: node selectors), same ipBlocks and networks around the
// address, same numbers behind the names of
// ports that policies mention. Policies in force are those that isolate a pod
// of this node; labels and blocks that only other policies name cost nothing.
// An address that nothing names has one of the fixed identities.
//
// A pod on the host's network is its node: it has no identity of its own, is
// selected by no policy and matches no selector of pods. The node reaching its own
// pods, and a pod reaching itself, are the datapath's business: the tables do
// not allow them.
//
// ICMP and other protocols without ports match rules without ports alone,
// and are isolated together with the pod.
//
// # What fails, and how
//
// A part of a policy that makes no sense (bad selector, block, port) matches
// nothing, and is named in [Output.Problems]; the rest of the policy holds. A
// policy whose own podSelector makes no sense isolates every pod of its
// namespace and allows nothing. A pod whose namespace is not in
// [Input.Namespaces] matches no namespaceSelector.
//
// A rule of a ClusterNetworkPolicy with a part that makes no sense, or that is
// of a later version of the API, fails closed as a whole: an Accept rule
// matches nothing, a Deny or Pass rule denies everything. So do domainNames,
// which are not supported. A ClusterNetworkPolicy whose tier or subject makes
// no sense is about every pod that may be meant and opens nothing: its Deny
// rules hold, Pass rules deny everything, Accept rules match nothing. So it
// counts, too, for a pod whose namespace is not known yet. Of equal priorities
// the first by name is asked first.
//
// # Changing over
//
// Numbers of identities, tables, classes and rules come from counters in
// [State] and are never handed out twice (classes: not before 65535 others).
// A table's entries never change: other entries are another table. A
// [Compiler] alone adds and removes entries of a table in use, those of
// identities that no address has yet, or any more ([Delta.Added],
// [Delta.Removed]), and of tables alone that no endpoint goes to or comes
// from in the same change.
//
// To go from the previous output to this one, in this order:
//
//  1. write all entries of Tables that are not there yet, those added to
//     tables in use among them, and Transitional: denials, then the rest of
//     the tables that have all of theirs;
//  2. write pw_port_class from PortClasses (ports not listed are class 0);
//  3. give the addresses and prefixes of Early their passing identities
//     (pw_addrs, pw_prefixes, pw_endpoints);
//  4. give every endpoint its tables;
//  5. give all addresses and prefixes their identities (Addrs, Prefixes), and
//     remove what is in neither;
//  6. bump the generations of endpoints whose table changed and of addresses
//     whose identity changed against the previous output;
//  7. remove the entries that are not in Tables, whole tables or of identities
//     that are gone, and Transitional: what is no denial first.
//
// Within a step any other order will do. At every moment in between, the verdict of
// each pod in each direction about each peer and port is one that the old or
// the new state gives, but that an endpoint which leaves a table that others
// keep, or comes to one, may be denied for a moment what both allow of a peer
// whose identity changes too; nothing is allowed that neither allows. What is missing
// of a table that could not be written whole (full map) are allowances, the
// default among them: going on is the safe way to fail. A table in use that
// lacks a Transitional denial is to lose its allowances, too.
//
// Outputs must be applied one after the other, each to its end, since each
// builds on the numbers of the one before. After a restart, [Restore] makes a
// State from what the maps hold.
//
// # What a change costs
//
// [Compile] looks at everything. A [Compiler] is told what is different: a pod
// costs the identities of its addresses, a few microseconds among any number of
// pods; an identity that comes or goes by it, a look at the tables whose policies
// mention it, or anybody, and their entries of it; a pod of this node, a pass over
// its endpoints; a namespace, the pods in it; a node, the addresses of nodes; a
// policy, a pass over the endpoints, and the tables of those that it selects. A
// change of the selectors, blocks and named egress ports in force looks at every
// pod once.
package policy
