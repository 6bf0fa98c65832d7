// Package hostile holds the contract cases of lies and nonsense on the wire:
// frames made by hand, sent by pods and by the underlay. None is delivered,
// each is counted under its reason, and flows in progress go on.
package hostile
