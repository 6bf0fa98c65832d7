package endpoint

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Check compares what exists with what Add made; the error names every
// difference. Addresses in the request are those that the runtime was told,
// port mappings those that it asks for still.
func (m *Manager) Check(ctx context.Context, req Request) error {
	if err := req.validate(); err != nil {
		return err
	}
	unknown := errorf(CodeUnknownContainer, "container %s has no interface %s here", req.ContainerID, req.IfName)
	e := m.get(req.Key())
	if e == nil {
		return unknown
	}
	unlock, err := m.lockPod(ctx, m.endpointOf(e).HostIfName)
	if err != nil {
		return err
	}
	defer unlock()
	if m.get(req.Key()) != e || m.phaseOf(e) != phaseReady {
		return unknown
	}
	ep := m.endpointOf(e)
	diffs, err := m.differences(ctx, ep, req)
	if err != nil {
		return AsError(fmt.Errorf("check %s: %w", ep, err))
	}
	if len(diffs) > 0 {
		return &Error{Code: CodeDiffers, Msg: fmt.Sprintf("%s is not as it was made", ep), Details: strings.Join(diffs, "; ")}
	}
	return nil
}

func (m *Manager) differences(ctx context.Context, ep Endpoint, req Request) ([]string, error) {
	var diffs []string
	if len(req.Addrs) > 0 {
		told := slices.Clone(req.Addrs)
		slices.SortFunc(told, netip.Addr.Compare)
		have := slices.Clone(ep.Addrs)
		slices.SortFunc(have, netip.Addr.Compare)
		if !slices.Equal(told, have) {
			diffs = append(diffs, fmt.Sprintf("the result of ADD has addresses %v, the endpoint %v", told, have))
		}
	}
	if asked := sortedMappings(req.PortMappings); req.PortMappings != nil && !slices.Equal(asked, ep.PortMappings) {
		diffs = append(diffs, fmt.Sprintf("the configuration has port mappings %v, the endpoint %v", asked, ep.PortMappings))
	}
	h, err := newHandle()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	host, err := hostDifferences(h, ep)
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, host...)
	settings, err := m.hostSysctlDifferences(ep)
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, settings...)
	path := req.Netns
	if path == "" {
		path = ep.Netns
	}
	pod, err := m.openPod(path)
	if err != nil {
		return nil, err
	}
	defer pod.close()
	inPod, err := podDifferences(pod.h, ep, req.MTU)
	if err != nil {
		return nil, err
	}
	diffs = append(diffs, inPod...)
	if prober, ok := m.cfg.Datapath.(Prober); ok {
		if err := m.attached(ctx, prober, ep); err != nil {
			diffs = append(diffs, fmt.Sprintf("programs on %s: %v", ep.HostIfName, err))
		}
	}
	if prober, ok := m.cfg.Regenerator.(PolicyProber); ok {
		if err := prober.InForce(ctx, ep); err != nil {
			diffs = append(diffs, fmt.Sprintf("policy is not in force: %v", err))
		}
	}
	return diffs, nil
}
