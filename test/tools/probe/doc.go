// Package probe defines what pw-server and pw-client say: the lines they
// exchange and the JSON that pw-client prints. The tools and the tests that
// read their output share these types, and nothing else.
package probe
