// Package packet tests the datapath packet by packet: every program under
// BPF_PROG_TEST_RUN, with crafted frames, over real maps that hold the small
// cluster of world_test.go. Every case runs for both families.
//
// Each single run is checked for what must always hold (run_test.go): one
// reason that says what became of the packet, an action that fits it, valid
// checksums, no growth. A redirect is not carried out under a test run; its
// target is read from the flow's entry.
package packet
