package source

import (
	"bytes"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/podweir/podweir/internal/fakeapi"
)

// granted is what the account of an installed agent may do, as "verb
// group/resource".
func granted(t *testing.T) map[string]bool {
	t.Helper()
	data, err := os.ReadFile("../../deploy/base/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, doc := range bytes.Split(data, []byte("\n---\n")) {
		var role rbacv1.ClusterRole
		if err := yaml.Unmarshal(doc, &role); err != nil {
			t.Fatal(err)
		}
		for _, r := range role.Rules {
			if len(r.NonResourceURLs) > 0 || len(r.ResourceNames) > 0 {
				t.Errorf("rule %+v: this test knows no such rules", r)
			}
			for _, verb := range r.Verbs {
				for _, group := range r.APIGroups {
					for _, resource := range r.Resources {
						out[verb+" "+group+"/"+resource] = true
					}
				}
			}
		}
	}
	return out
}

// asked notes what requests ask for, in the words of roles.
type asked struct {
	next http.RoundTripper
	mu   sync.Mutex
	all  map[string]bool
}

func (a *asked) RoundTrip(req *http.Request) (*http.Response, error) {
	// /api/v1/pods, /apis/GROUP/VERSION/pods; what is longer is one object.
	parts := strings.Split(strings.Trim(req.URL.Path, "/"), "/")
	group := ""
	if parts[0] == "apis" {
		group, parts = parts[1], parts[1:]
	}
	verb := strings.ToLower(req.Method)
	if verb == "get" && len(parts) == 3 {
		if verb = "list"; req.URL.Query().Get("watch") == "true" {
			verb = "watch"
		}
	}
	a.mu.Lock()
	a.all[verb+" "+group+"/"+strings.Join(parts[2:], "/")] = true
	a.mu.Unlock()
	return a.next.RoundTrip(req)
}

// The account may do what the source asks for, and nothing else: lists and
// watches of every kind. A server that can stream lists is asked for no other.
func TestRoleIsWhatIsAsked(t *testing.T) {
	may := granted(t)
	all := map[string]bool{}
	for _, streams := range []bool{true, false} {
		s := fakeapi.New(t)
		s.SetWatchList(streams)
		fill(s)
		tables := newTables(t)
		rc := s.Config()
		a := &asked{all: map[string]bool{}}
		rc.Wrap(func(next http.RoundTripper) http.RoundTripper {
			a.next = next
			return a
		})
		run(t, NewAPI(client(t, rc), tables, testLog(t)))
		waitSynced(t, tables)
		for _, k := range kinds() {
			s.Await(t, k.resource, func(st fakeapi.Stats) bool { return st.Open == 1 })
		}
		a.mu.Lock()
		for what := range a.all {
			all[what] = true
			if streams && !strings.HasPrefix(what, "watch ") {
				t.Errorf("%s, of a server that streams lists", what)
			}
		}
		a.mu.Unlock()
	}
	if have, want := keysOf(all), keysOf(may); !slices.Equal(have, want) {
		t.Errorf("the agent asks for\n%s\nand may\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
	if len(all) != 2*len(kinds()) {
		t.Errorf("%d permissions for %d kinds", len(all), len(kinds()))
	}
}
