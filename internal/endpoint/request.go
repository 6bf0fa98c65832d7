package endpoint

import (
	"errors"
	"fmt"
	"strings"
)

// maxContainerID keeps names of files within what file systems take.
const maxContainerID = 200

// Validate refuses keys that no endpoint can have: they are no safe file names.
func (k Key) Validate() error {
	if err := validContainerID(k.ContainerID); err != nil {
		return err
	}
	return validIfName(k.IfName)
}

func validContainerID(id string) error {
	if id == "" {
		return errors.New("the container id is empty")
	}
	if len(id) > maxContainerID {
		return fmt.Errorf("the container id has %d characters, %d are possible", len(id), maxContainerID)
	}
	for i, r := range id {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("_.-", r)) {
			return fmt.Errorf("container id %q: letters, digits, and after the first character '_', '.', '-' are possible", id)
		}
	}
	return nil
}

func validIfName(name string) error {
	if name == "" || len(name) > 15 || name == "." || name == ".." || name == "lo" || name == "all" || name == "default" {
		return fmt.Errorf("interface name %q is not possible", name)
	}
	for _, r := range name {
		if r <= ' ' || r > '~' || r == '/' || r == ':' || r == '%' {
			return fmt.Errorf("interface name %q: character %q is not possible", name, r)
		}
	}
	return nil
}

func (r Request) validate() error {
	if err := r.Key().Validate(); err != nil {
		return errorf(CodeBadRequest, "%w", err)
	}
	if (r.Namespace == "") != (r.Pod == "") {
		return errorf(CodeBadRequest, "K8S_POD_NAMESPACE is %q and K8S_POD_NAME is %q: give both or neither", r.Namespace, r.Pod)
	}
	if _, err := portMappings(r.PortMappings); err != nil {
		return errorf(CodeBadRequest, "%w", err)
	}
	return nil
}
