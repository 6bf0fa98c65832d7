// Package agent is the process of a node: it keeps the maps, the programs and
// the node's network stack as the tables of objects say.
//
// One goroutine, the loop, owns all of that state. It wakes on changes of the
// tables, of endpoints and of the node's devices, compiles what is affected
// with the pure packages, and applies the difference:
//
//   - nothing is written or removed before every table is complete;
//   - what is referred to is written before what refers to it and removed
//     after it (see peers.apply and services.apply for the two orders);
//   - generations move after what they stand for has changed;
//   - an entry that cannot be written is reported, stops nothing else, and is
//     tried again.
//
// At a start over pinned maps the numbers found there are adopted (node ids,
// generation slots, service ids, backend sets; table and identity numbers
// continue above them) and leftovers go with the first full round. Stopping
// leaves everything in place: traffic goes on without the agent.
package agent
