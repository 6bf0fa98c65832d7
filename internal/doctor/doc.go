// Package doctor looks for what is broken on a node and says what to do.
//
// Contract:
//   - A check is a function from what the node shows ([Facts]) to findings. A
//     check without findings is well. Checks are independent; one that cannot
//     be made says so, and hinders no other.
//   - Every finding that is not "ok" names what is affected and, where there
//     is one, the way out.
//   - Nothing is changed. The kernel, the agent and the maps are asked through
//     [Facts] and [Host] alone, which tests replace.
package doctor
