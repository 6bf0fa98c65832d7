//go:build realcluster

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/podweir/podweir/internal/apiserver"
	"github.com/podweir/podweir/internal/source"
	"github.com/podweir/podweir/internal/table"
	"github.com/podweir/podweir/test/realcluster"
)

// What the agents may ask the API server, and how they show who they are.
func TestAccess(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.each(map[string]func(*world){
		"LeastPrivilege": leastPrivilege,
		"TokenRotation":  tokenRotation,
	})
}

const account = "podweir-agent"

// token is one of the agents' account, good as long as a secret is there.
func (w *world) token(secret string) string {
	w.Helper()
	s, err := w.api.CoreV1().Secrets(system).Create(w.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: w.ns + "-" + secret}}, metav1.CreateOptions{})
	must(w, err)
	w.Cleanup(func() {
		err := w.api.CoreV1().Secrets(system).Delete(background(w), s.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			w.Error(err)
		}
	})
	seconds := int64(600)
	r, err := w.api.CoreV1().ServiceAccounts(system).CreateToken(w.ctx, account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &seconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Secret", APIVersion: "v1", Name: s.Name, UID: s.UID},
	}}, metav1.CreateOptions{})
	must(w, err)
	return r.Status.Token
}

func (w *world) withToken(token string) *kubernetes.Clientset {
	w.Helper()
	c := rest.AnonymousClientConfig(w.config)
	c.BearerToken = token
	api, err := kubernetes.NewForConfig(c)
	must(w, err)
	return api
}

// rules are the verbs that a client may use, by kind of object.
func (w *world) rules(api *kubernetes.Clientset) map[string][]string {
	w.Helper()
	review, err := api.AuthorizationV1().SelfSubjectRulesReviews().Create(w.ctx,
		&authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: system}}, metav1.CreateOptions{})
	must(w, err)
	out := map[string][]string{}
	for _, r := range review.Status.ResourceRules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				out[group+"/"+resource] = append(out[group+"/"+resource], r.Verbs...)
			}
		}
	}
	return out
}

// The account may do what it is granted, which is what agents have asked for
// since the cluster is up, and nothing else.
func leastPrivilege(w *world) {
	role, err := w.api.RbacV1().ClusterRoles().Get(w.ctx, account, metav1.GetOptions{})
	must(w, err)
	granted := map[string][]string{}
	for _, r := range role.Rules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				granted[group+"/"+resource] = r.Verbs
			}
		}
	}
	// What the API server itself says of the account, less what any account may.
	api := w.withToken(w.token("rules"))
	r, err := w.api.CoreV1().ServiceAccounts(w.ns).CreateToken(w.ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	must(w, err)
	everybodys, have := w.rules(w.withToken(r.Status.Token)), w.rules(api)
	for what, verbs := range everybodys {
		have[what] = slices.DeleteFunc(have[what], func(v string) bool { return slices.Contains(verbs, v) })
		if len(have[what]) == 0 {
			delete(have, what)
		}
	}
	if !maps.EqualFunc(have, granted, func(a, b []string) bool {
		slices.Sort(a)
		slices.Sort(b)
		return slices.Equal(a, b)
	}) {
		w.Errorf("the account may %v, its role says %v", have, granted)
	}
	for _, verb := range []string{"create", "update", "patch", "delete"} {
		r, err := api.AuthorizationV1().SelfSubjectAccessReviews().Create(w.ctx, &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Resource: "pods", Namespace: system}}}, metav1.CreateOptions{})
		must(w, err)
		if r.Status.Allowed {
			w.Errorf("the account may %s pods", verb)
		}
	}
	// What was used.
	f, err := os.Open(w.cluster.AuditLog())
	must(w, err)
	defer f.Close()
	used, forbidden := map[string]map[string]bool{}, map[string]bool{}
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<22)
	for in.Scan() {
		var e struct {
			Verb           string
			UserAgent      string
			ObjectRef      *struct{ Resource, APIGroup string }
			ResponseStatus struct{ Code int }
		}
		if json.Unmarshal(in.Bytes(), &e) != nil || e.ObjectRef == nil || !strings.HasPrefix(e.UserAgent, "podweir-agent") {
			continue
		}
		what := e.ObjectRef.APIGroup + "/" + e.ObjectRef.Resource
		// A server that has only started knows no roles for a moment.
		forbidden[what] = e.ResponseStatus.Code == 403
		if used[what] == nil {
			used[what] = map[string]bool{}
		}
		used[what][e.Verb] = true
	}
	must(w, in.Err())
	for what, last := range forbidden {
		if last {
			w.Errorf("an agent was forbidden to read %s", what)
		}
	}
	for what, verbs := range granted {
		for _, verb := range verbs {
			// A server that streams lists is asked for none.
			if !used[what][verb] && !(verb == "list" && used[what]["watch"]) {
				w.Errorf("%s of %s is granted, and no agent has used it", verb, what)
			}
		}
	}
	for what, verbs := range used {
		for verb := range verbs {
			if !slices.Contains(granted[what], verb) {
				w.Errorf("an agent has asked to %s %s, which is not granted", verb, what)
			}
		}
	}
}

// A token that is not good any more is no end: the next one is in the file by
// then. What an agent reads with goes on, with new requests, too.
func tokenRotation(w *world) {
	dir := w.TempDir()
	ca, err := os.ReadFile(w.config.CAFile)
	must(w, err)
	must(w, os.WriteFile(filepath.Join(dir, "ca.crt"), ca, 0o600))
	write := func(token string) {
		// As the kubelet does: whole or not at all.
		must(w, os.WriteFile(filepath.Join(dir, "next"), []byte(token), 0o600))
		must(w, os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, "token")))
	}
	first, second := w.token("first"), w.token("second")
	write(first)
	servers, err := apiserver.ParseServers([]string{realcluster.HostIP + ":6443"})
	must(w, err)
	rc, _, err := apiserver.Config(apiserver.Options{Servers: servers, AccountDir: dir, UserAgent: "e2e"})
	must(w, err)
	client, err := source.NewClient(rc)
	must(w, err)
	read := func() *table.Tables {
		tables, err := table.New()
		must(w, err)
		ctx, cancel := context.WithCancel(w.ctx)
		done := make(chan error)
		go func() {
			done <- source.NewAPI(client, tables, slog.New(slog.NewTextHandler(w.Output(), nil))).Run(ctx)
		}()
		w.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				w.Error(err)
			}
		})
		must(w, tables.WaitSynced(w.ctx))
		return tables
	}
	before := read()
	write(second)
	must(w, w.api.CoreV1().Secrets(system).Delete(w.ctx, w.ns+"-first", metav1.DeleteOptions{}))
	w.eventually("the first token is good no more", func() error {
		_, err := w.withToken(first).CoreV1().Nodes().List(w.ctx, metav1.ListOptions{})
		if !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("error %v, want unauthorized", err)
		}
		return nil
	})
	// Within a minute, for which the client remembers what it has read.
	after := read()
	svc := w.service("rotated", "nobody", nil)
	for name, tables := range map[string]*table.Tables{"that ran": before, "that began": after} {
		w.eventually("a reader "+name+" sees a new service", func() error {
			for s := range tables.Services.All(tables.DB.ReadTxn()) {
				if s.Namespace == w.ns && s.Name == svc.Name {
					return nil
				}
			}
			return fmt.Errorf("not among %d", tables.Services.NumObjects(tables.DB.ReadTxn()))
		})
	}
}
