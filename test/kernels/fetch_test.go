package kernels

import "testing"

func TestNewestIsByNumber(t *testing.T) {
	for _, c := range []struct {
		older, newer string
	}{
		{"linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-57-cloud-amd64"},
		{"linux-image-6.12.99+deb12-cloud-amd64", "linux-image-6.12.117+deb12-cloud-amd64"},
		{"linux-image-6.12.117+deb12-cloud-amd64", "linux-image-6.12.118+deb12-cloud-amd64"},
	} {
		if compareVersions(c.older, c.newer) >= 0 || compareVersions(c.newer, c.older) <= 0 {
			t.Errorf("%s is not older than %s", c.older, c.newer)
		}
	}
}
