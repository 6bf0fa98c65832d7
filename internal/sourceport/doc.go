// Package sourceport says which source ports flows may be translated to: none
// that the host takes for its own connections (net.ipv4.ip_local_port_range,
// which holds for IPv6, too), none that a NodePort may have, none below 1024.
// It is pure.
package sourceport
