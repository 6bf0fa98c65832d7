package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podweir/podweir/internal/endpoint"
)

const (
	defaultSocket   = "/run/podweir/agent.sock"
	defaultStateDir = "/var/lib/podweir"
	defaultTimeout  = time.Minute
)

// config is the part of the network configuration that counts.
type config struct {
	types.PluginConf
	Socket        string `json:"socket"`
	StateDir      string `json:"stateDir"`
	Timeout       string `json:"timeout"`
	LogLevel      string `json:"logLevel"`
	RuntimeConfig struct {
		IPs          []string      `json:"ips"`
		PortMappings []portMapping `json:"portMappings"`
		Bandwidth    *bandwidth    `json:"bandwidth"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			IPs []string `json:"ips"`
		} `json:"cni"`
	} `json:"args"`

	// hasValid: the list of valid attachments is there, if perhaps empty. That
	// is what null stands for: the library that runtimes use writes it for a
	// list without elements.
	hasValid bool
	timeout  time.Duration
	level    slog.Level
}

// bandwidth is what the plugin bandwidth is told too, which limits: bits per
// second and bits. podweir makes room for it, see [endpoint.Request.SendLimited].
type bandwidth struct {
	IngressRate  uint64 `json:"ingressRate"`
	IngressBurst uint64 `json:"ingressBurst"`
	EgressRate   uint64 `json:"egressRate"`
	EgressBurst  uint64 `json:"egressBurst"`
}

// portMapping is one entry of the capability as runtimes write it.
type portMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// knownKeys returns the keys that a configuration may have; runtimes add
// others, which have a slash.
func knownKeys() []string {
	return []string{
		"cniVersion", "cniVersions", "name", "type", "capabilities", "dns", "args", "runtimeConfig", "prevResult",
		"disableCheck", "disableGC", "loadOnlyInlinedPlugins",
		"socket", "stateDir", "timeout", "logLevel",
	}
}

// parseConfig reads a configuration and refuses what is not understood.
func parseConfig(data []byte) (*config, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration: "+err.Error(), "")
	}
	for k, v := range keys {
		if k == "ipam" {
			return nil, types.NewError(types.ErrUnsupportedField,
				fmt.Sprintf("network configuration: \"ipam\": %s: podweir gives addresses itself; remove the key", v), "")
		}
		if !slices.Contains(knownKeys(), k) && !strings.Contains(k, "/") {
			return nil, types.NewError(types.ErrUnsupportedField,
				fmt.Sprintf("network configuration: %q: %s: the key is unknown", k, v), "known are "+strings.Join(knownKeys(), ", "))
		}
	}
	var capabilities map[string]json.RawMessage
	if raw, ok := keys["runtimeConfig"]; ok {
		if err := json.Unmarshal(raw, &capabilities); err != nil {
			return nil, badConfig("runtimeConfig: %v", err)
		}
	}
	for k, v := range capabilities {
		if k != "ips" && k != "portMappings" && k != "bandwidth" {
			return nil, types.NewError(types.ErrUnsupportedField,
				fmt.Sprintf("network configuration: runtimeConfig %q: %s: the capability is not supported; remove it from \"capabilities\"", k, v), "")
		}
	}
	c, err := decodeConfig(data)
	if err != nil {
		return nil, badConfig("%v", err)
	}
	_, c.hasValid = keys["cni.dev/valid-attachments"]
	return c, nil
}

// lenientConfig reads what can be read: nothing in a configuration may stand
// in the way of a deletion.
func lenientConfig(data []byte) *config {
	if c, err := decodeConfig(data); err == nil {
		return c
	}
	var paths struct{ Socket, StateDir any }
	_ = json.Unmarshal(data, &paths)
	c := &config{timeout: defaultTimeout, level: slog.LevelWarn, Socket: defaultSocket, StateDir: defaultStateDir}
	if s, ok := paths.Socket.(string); ok && s != "" {
		c.Socket = s
	}
	if s, ok := paths.StateDir.(string); ok && s != "" {
		c.StateDir = s
	}
	return c
}

func decodeConfig(data []byte) (*config, error) {
	c := &config{Socket: defaultSocket, StateDir: defaultStateDir, timeout: defaultTimeout, level: slog.LevelWarn}
	if err := json.Unmarshal(data, c); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(c.Socket, "/") {
		return nil, fmt.Errorf("socket: %q is no absolute path", c.Socket)
	}
	if !strings.HasPrefix(c.StateDir, "/") {
		return nil, fmt.Errorf("stateDir: %q is no absolute path", c.StateDir)
	}
	if c.Timeout != "" {
		d, err := time.ParseDuration(c.Timeout)
		if err != nil || d <= 0 {
			return nil, fmt.Errorf("timeout: %q is no duration such as \"30s\"", c.Timeout)
		}
		c.timeout = d
	}
	if c.LogLevel != "" {
		if err := c.level.UnmarshalText([]byte(c.LogLevel)); err != nil {
			return nil, fmt.Errorf("logLevel: %q is none of debug, info, warn, error", c.LogLevel)
		}
	}
	return c, nil
}

func badConfig(format string, args ...any) error {
	return types.NewError(types.ErrInvalidNetworkConfig, "network configuration: "+fmt.Sprintf(format, args...), "")
}

// parseArgs splits CNI_ARGS.
func parseArgs(s string) (map[string]string, error) {
	out := map[string]string{}
	for pair := range strings.SplitSeq(s, ";") {
		if pair == "" {
			continue
		}
		k, v, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_ARGS: %q is not KEY=VALUE", pair), "")
		}
		out[k] = v
	}
	return out, nil
}

// request builds what the agent is asked for.
func request(args *skel.CmdArgs, c *config) (endpoint.Request, error) {
	pairs, err := parseArgs(args.Args)
	if err != nil {
		return endpoint.Request{}, err
	}
	req := endpoint.Request{
		ContainerID: args.ContainerID, IfName: args.IfName, Netns: args.Netns, Network: c.Name,
		Namespace: pairs["K8S_POD_NAMESPACE"], Pod: pairs["K8S_POD_NAME"], UID: pairs["K8S_POD_UID"],
	}
	if req.PortMappings, err = parsePortMappings(c.RuntimeConfig.PortMappings); err != nil {
		return req, badConfig("runtimeConfig.portMappings%v", err)
	}
	if b := c.RuntimeConfig.Bandwidth; b != nil {
		req.SendLimited = b.EgressRate > 0
	}
	switch {
	case len(c.RuntimeConfig.IPs) > 0:
		if req.Addrs, err = parseAddrs(c.RuntimeConfig.IPs); err != nil {
			err = badConfig("runtimeConfig.ips: %v", err)
		}
	case len(c.Args.CNI.IPs) > 0:
		if req.Addrs, err = parseAddrs(c.Args.CNI.IPs); err != nil {
			err = badConfig("args.cni.ips: %v", err)
		}
	case pairs["IP"] != "":
		if req.Addrs, err = parseAddrs(strings.Split(pairs["IP"], ",")); err != nil {
			err = types.NewError(types.ErrInvalidEnvironmentVariables, "CNI_ARGS: IP: "+err.Error(), "")
		}
	}
	return req, err
}

// parseAddrs reads addresses with or without a prefix length; podweir gives
// single addresses whatever the length.
func parseAddrs(list []string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range list {
		host, _, _ := strings.Cut(s, "/")
		a, err := netip.ParseAddr(host)
		if err == nil && strings.Contains(s, "/") {
			_, err = netip.ParsePrefix(s)
		}
		if err != nil || a.Zone() != "" {
			return nil, fmt.Errorf("%q is no IP address", s)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}

// parsePortMappings keeps nil apart from none: with nil nothing was said.
func parsePortMappings(list []portMapping) ([]endpoint.PortMapping, error) {
	if list == nil {
		return nil, nil
	}
	out := make([]endpoint.PortMapping, 0, len(list))
	for i, p := range list {
		fail := func(format string, args ...any) ([]endpoint.PortMapping, error) {
			return nil, fmt.Errorf("[%d].%s", i, fmt.Sprintf(format, args...))
		}
		if p.HostPort < 1 || p.HostPort > 65535 {
			return fail("hostPort: %d is no port: 1 to 65535 are", p.HostPort)
		}
		if p.ContainerPort < 1 || p.ContainerPort > 65535 {
			return fail("containerPort: %d is no port: 1 to 65535 are", p.ContainerPort)
		}
		m := endpoint.PortMapping{
			HostPort: uint16(p.HostPort), ContainerPort: uint16(p.ContainerPort), Protocol: strings.ToUpper(p.Protocol),
		}
		switch m.Protocol {
		case "":
			m.Protocol = "TCP"
		case "TCP", "UDP", "SCTP":
		default:
			return fail("protocol: %q is none of tcp, udp and sctp", p.Protocol)
		}
		if p.HostIP != "" {
			a, err := netip.ParseAddr(p.HostIP)
			if err != nil || a.Zone() != "" || a.Unmap().IsMulticast() {
				return fail("hostIP: %q is no address that a node can have", p.HostIP)
			}
			m.HostIP = a.Unmap()
		}
		out = append(out, m)
	}
	return out, nil
}

// previous is the result of the plugins before this one, or, at CHECK, of all;
// nil if there is none.
func previous(data []byte) (*types100.Result, error) {
	conf := types.PluginConf{}
	if err := json.Unmarshal(data, &conf); err != nil {
		return nil, badConfig("%v", err)
	}
	if conf.RawPrevResult == nil {
		return nil, nil
	}
	if err := version.ParsePrevResult(&conf); err != nil {
		return nil, badConfig("prevResult: %v", err)
	}
	prev, err := types100.NewResultFromResult(conf.PrevResult)
	if err != nil {
		return nil, badConfig("prevResult: %v", err)
	}
	return prev, nil
}
