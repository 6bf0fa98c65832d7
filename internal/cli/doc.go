// Package cli is the podweir command: what stands in the datapath's maps,
// as tables or JSON.
//
// States are read from the pinned maps, read-only. Names (of pods, nodes,
// services, rules) come from the agent's socket; without the agent every
// command works all the same, with numbers and addresses in place of names,
// and says so on the error output.
//
// Exit statuses: 0 done (with or without the agent); 1 it failed; 2 wrong
// usage; 3 no maps are pinned where --bpffs points; 4 no permission to read
// them.
package cli
