package source

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
	"sigs.k8s.io/yaml"
)

func faults(p parsed) string {
	var out []string
	for _, f := range p.faults {
		out = append(out, fmt.Sprintf("%d %s: %v", f.line, f.key, f.err))
	}
	return strings.Join(out, "\n")
}

func parse(text string) parsed { return parseManifests(kinds(), text) }

const svcHead = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n"

const cnpHead = "apiVersion: policy.networking.k8s.io/v1beta1\nkind: ClusterNetworkPolicy\nmetadata: {name: p}\nspec:\n"

// A ClusterNetworkPolicy is read in both versions; what the API accepts and we
// do not support is in force, and fails closed.
func TestClusterPolicyManifests(t *testing.T) {
	for _, version := range []string{"v1beta1", "v1alpha2"} {
		p := parse(strings.Replace(cnpHead, "v1beta1", version, 1) +
			"  tier: Baseline\n  priority: 7\n  subject: {namespaces: {}}\n  egress:\n  - action: Accept\n    to:\n    - domainNames: [example.org]\n")
		if len(p.faults) > 0 || len(p.objects) != 1 {
			t.Fatalf("%s: %d objects\n%s", version, len(p.objects), faults(p))
		}
		if got := p.objects[0].obj.(*v1beta1.ClusterNetworkPolicy); got.Spec.Priority != 7 || got.Namespace != "" || got.UID == "" {
			t.Errorf("%s: %+v", version, got)
		}
	}
}

// Each mistake, alone in a document, and the report of it.
func TestFaults(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"syntax":                {"apiVersion: v1\nkind: [Service\nmetadata: {name: web}\n", "not valid YAML"},
		"tab":                   {"apiVersion: v1\n\tkind: Service\n", "not valid YAML"},
		"not an object":         {"- a\n- b\n", "1 : not an object: write a mapping"},
		"scalar":                {"hello\n", "1 : not an object"},
		"no kind":               {"apiVersion: v1\nmetadata: {name: web}\n", "kind is missing"},
		"no apiVersion":         {"kind: Service\nmetadata: {name: web}\n", "Service default/web: apiVersion is missing: write apiVersion: v1"},
		"wrong apiVersion":      {"kind: EndpointSlice\nmetadata: {name: web}\napiVersion: discovery.k8s.io/v1beta1\n", "3 EndpointSlice default/web: apiVersion \"discovery.k8s.io/v1beta1\" of kind EndpointSlice is not read: write apiVersion: discovery.k8s.io/v1"},
		"unsupported kind":      {"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n", "2 Deployment web: kind \"Deployment\" (apiVersion \"apps/v1\") is not read from a manifest directory"},
		"kind in lower case":    {"apiVersion: v1\nkind: service\nmetadata: {name: web}\n", "kind \"service\" is unknown: write \"Service\""},
		"no name":               {"apiVersion: v1\nkind: Pod\nmetadata:\n  labels: {a: b}\n", "4 Pod: metadata.name is missing: give the object a name"},
		"generateName":          {"apiVersion: v1\nkind: Pod\nmetadata: {generateName: a-}\n", "nothing here generates names"},
		"unknown field":         {svcHead + "  clusterIP: None\n  selecter: {a: b}\n", "6 Service default/web: unknown field \"spec.selecter\": check its spelling"},
		"unknown in a list":     {svcHead + "  clusterIP: None\n  ports:\n  - port: 80\n  - port: 81\n    protcol: TCP\n", "9 Service default/web: unknown field \"spec.ports[1].protcol\""},
		"case":                  {svcHead + "  clusterIp: None\n", "unknown field \"spec.clusterIp\""},
		"duplicate field":       {svcHead + "  clusterIP: None\n  type: ClusterIP\n  clusterIP: None\n", "7 Service default/web: field \"clusterIP\" stands twice"},
		"text for number":       {svcHead + "  clusterIP: None\n  ports:\n  - name: http\n    port: http\n", "8 Service default/web: spec.ports.port: the value is of type string; the field takes a whole number (int32)"},
		"number for text":       {"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels:\n    version: 1\n", "6 Pod default/web: metadata.labels: the value is of type number; the field takes a text: put it in quotes"},
		"yes for text":          {"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels:\n    canary: yes\n", "6 Pod default/web: metadata.labels: the value is of type bool"},
		"mapping for list":      {svcHead + "  clusterIP: None\n  ports:\n    port: 80\n", "Service default/web: spec.ports: the value is of type object; the field takes a list"},
		"number too large":      {svcHead + "  clusterIP: None\n  ports:\n  - port: 99999999999\n", "spec.ports.port: the value is of type number 99999999999"},
		"bad name":              {"apiVersion: v1\nkind: Pod\nmetadata:\n  name: Web_1\n", "4 Pod default/Web_1: metadata.name: Invalid value: \"Web_1\""},
		"bad namespace":         {"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  namespace: a.b\n", "5 Pod a.b/web: metadata.namespace"},
		"namespace of a node":   {"apiVersion: v1\nkind: Node\nmetadata:\n  name: a\n  namespace: x\n", "5 Node a: metadata.namespace: Invalid value: \"x\": a Node belongs to no namespace"},
		"bad label":             {"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels:\n    a: 'no spaces'\n", "Pod default/web: metadata.labels: Invalid value"},
		"no clusterIP":          {svcHead + "  ports: [{port: 80}]\n", "4 Service default/web: spec.clusterIP: Required value: nothing allocates service addresses"},
		"bad clusterIP":         {svcHead + "  ports: [{port: 80}]\n  clusterIP: 10.98.0.256\n", "6 Service default/web: spec.clusterIP: Invalid value: \"10.98.0.256\": not an IP address"},
		"two of one family":     {svcHead + "  ports: [{port: 80}]\n  clusterIP: 10.98.0.1\n  clusterIPs: [10.98.0.1, 10.98.0.2]\n", "spec.clusterIPs[1]"},
		"port 0":                {svcHead + "  clusterIP: 10.98.0.1\n  ports:\n  - port: 0\n", "7 Service default/web: spec.ports[0].port: Invalid value: 0: must be from 1 to 65535"},
		"port 65536":            {svcHead + "  clusterIP: 10.98.0.1\n  ports:\n  - port: 65536\n", "must be from 1 to 65535"},
		"protocol":              {svcHead + "  clusterIP: 10.98.0.1\n  ports:\n  - port: 80\n    protocol: tcp\n", "8 Service default/web: spec.ports[0].protocol: Unsupported value: \"tcp\""},
		"nameless ports":        {svcHead + "  clusterIP: 10.98.0.1\n  ports: [{port: 80}, {port: 81, name: b}]\n", "spec.ports[0].name: Required value"},
		"service type":          {svcHead + "  clusterIP: 10.98.0.1\n  type: clusterip\n  ports: [{port: 80}]\n", "6 Service default/web: spec.type: Unsupported value"},
		"no nodePort":           {svcHead + "  clusterIP: 10.98.0.1\n  type: NodePort\n  ports:\n  - port: 80\n", "8 Service default/web: spec.ports[0].nodePort: Required value: nothing allocates NodePorts"},
		"nodePort of ClusterIP": {svcHead + "  clusterIP: 10.98.0.1\n  ports:\n  - port: 80\n    nodePort: 30080\n", "8 Service default/web: spec.ports[0].nodePort: Forbidden"},
		"nodePort twice":        {svcHead + "  clusterIP: 10.98.0.1\n  type: NodePort\n  ports:\n  - {name: a, port: 80, nodePort: 30080}\n  - {name: b, port: 81, nodePort: 30080}\n", "9 Service default/web: spec.ports[1].nodePort: Duplicate value"},
		"external IP":           {svcHead + "  clusterIP: 10.98.0.1\n  ports: [{port: 80}]\n  externalIPs:\n  - 192.0.2\n", "8 Service default/web: spec.externalIPs[0]: Invalid value"},
		"source range":          {svcHead + "  clusterIP: 10.98.0.1\n  type: LoadBalancer\n  ports: [{port: 80}]\n  loadBalancerSourceRanges: [192.0.2.0]\n", "8 Service default/web: spec.loadBalancerSourceRanges[0]: Invalid value"},
		"ranges of a NodePort":  {svcHead + "  clusterIP: 10.98.0.1\n  type: NodePort\n  ports: [{port: 80, nodePort: 30080}]\n  loadBalancerSourceRanges: [192.0.2.0/24]\n", "8 Service default/web: spec.loadBalancerSourceRanges: Forbidden"},
		"policy of ClusterIP":   {svcHead + "  clusterIP: 10.98.0.1\n  ports: [{port: 80}]\n  externalTrafficPolicy: Local\n", "7 Service default/web: spec.externalTrafficPolicy: Forbidden"},
		"external policy":       {svcHead + "  clusterIP: 10.98.0.1\n  type: NodePort\n  ports: [{port: 80, nodePort: 30080}]\n  externalTrafficPolicy: local\n", "8 Service default/web: spec.externalTrafficPolicy: Unsupported value"},
		"health check":          {svcHead + "  clusterIP: 10.98.0.1\n  type: LoadBalancer\n  ports: [{port: 80}]\n  healthCheckNodePort: 31000\n", "8 Service default/web: spec.healthCheckNodePort: Forbidden"},
		"distribution":          {svcHead + "  clusterIP: 10.98.0.1\n  ports: [{port: 80}]\n  trafficDistribution: PreferFar\n", "7 Service default/web: spec.trafficDistribution: Unsupported value"},
		"affinity timeout":      {svcHead + "  clusterIP: 10.98.0.1\n  ports: [{port: 80}]\n  sessionAffinity: ClientIP\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}\n", "sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 0"},
		"ipMode":                {svcHead + "  clusterIP: 10.98.0.1\n  type: LoadBalancer\n  ports: [{port: 80}]\nstatus:\n  loadBalancer:\n    ingress:\n    - ip: 192.0.2.1\n      ipMode: Vip\n", "12 Service default/web: status.loadBalancer.ingress[0].ipMode: Unsupported value"},
		"pod address":           {"apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nstatus:\n  podIPs:\n  - ip: 10.244.80.65\n  - ip: nonsense\n", "7 Pod default/web: status.podIPs[1].ip: Invalid value: \"nonsense\""},
		"pod addresses":         {"apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nstatus:\n  podIP: 10.0.0.1\n  podIPs: [{ip: 10.0.0.2}]\n", "5 Pod default/web: status.podIP: Invalid value: \"10.0.0.1\": must be the first of podIPs"},
		"mapped address":        {"apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nstatus: {podIP: '::ffff:10.0.0.1'}\n", "write 10.0.0.1"},
		"node range":            {"apiVersion: v1\nkind: Node\nmetadata: {name: a}\nspec:\n  podCIDR: 10.244.80.0\n", "Node a: spec.podCIDRs[0]: Invalid value: \"10.244.80.0\": not a range"},
		"node address":          {"apiVersion: v1\nkind: Node\nmetadata: {name: a}\nstatus:\n  addresses:\n  - {type: InternalIP, address: node-a}\n", "6 Node a: status.addresses[0].address"},
		"service range":         {"apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\nspec:\n  cidrs: [10.98.1.0/16]\n", "5 ServiceCIDR a: spec.cidrs[0]: Invalid value: \"10.98.1.0/16\": has bits set after its prefix length: write 10.98.0.0/16"},
		"no service range":      {"apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\n", "spec.cidrs: Required value"},
		"slice family":          {"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\naddressType: IPv4\nendpoints:\n- addresses: ['fd00::1']\n", "6 EndpointSlice default/a: endpoints[0].addresses[0]"},
		"slice without type":    {"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\nendpoints: []\n", "addressType: Unsupported value: \"\""},
		"endpoint without one":  {"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\naddressType: IPv4\nendpoints:\n- addresses: []\n", "endpoints[0].addresses: Required value"},
		"policy peer":           {"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  podSelector: {}\n  ingress:\n  - from:\n    - {}\n", "8 NetworkPolicy default/p: spec.ingress[0].from[0]: Required value"},
		"policy selector":       {"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  podSelector:\n    matchExpressions:\n    - {key: a, operator: Equals, values: [b]}\n", "spec.podSelector.matchExpressions[0].operator"},
		"policy endPort":        {"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  podSelector: {}\n  ingress:\n  - ports:\n    - port: 90\n      endPort: 80\n", "9 NetworkPolicy default/p: spec.ingress[0].ports[0].endPort: Invalid value: 80: must not be less than port"},
		"policy except":         {"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  podSelector: {}\n  egress:\n  - to:\n    - ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/9]}\n", "spec.egress[0].to[0].ipBlock.except[0]"},
		"cluster policy tier":   {cnpHead + "  tier: Platform\n  priority: 1\n  subject: {namespaces: {}}\n", "5 ClusterNetworkPolicy p: spec.tier: Forbidden: \"Platform\" is neither Admin nor Baseline"},
		"cluster policy peer":   {cnpHead + "  tier: Admin\n  priority: 1\n  subject: {namespaces: {}}\n  ingress:\n  - action: Deny\n    from:\n    - {}\n", "11 ClusterNetworkPolicy p: spec.ingress[0].from[0]: Forbidden: is none of"},
		"cluster policy field":  {cnpHead + "  tier: Admin\n  priority: 1\n  subject: {namespaces: {}}\n  ingress:\n  - action: Deny\n    from:\n    - networks: [10.0.0.0/8]\n", "unknown field \"spec.ingress[0].from[0].networks\""},
		"cluster policy range":  {cnpHead + "  tier: Admin\n  priority: 1001\n  subject: {namespaces: {}}\n", "6 ClusterNetworkPolicy p: spec.priority"},
		"old cluster policy":    {strings.Replace(cnpHead, "v1beta1", "v1alpha1", 1), "apiVersion \"policy.networking.k8s.io/v1alpha1\" of kind ClusterNetworkPolicy is not read"},
		"namespace label":       {"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: a\n  labels:\n    kubernetes.io/metadata.name: b\n", "must be the namespace's name: remove the label"},
		"list without items":    {"apiVersion: v1\nkind: List\n", "items is missing"},
		"list of unsupported":   {"apiVersion: apps/v1\nkind: DeploymentList\nitems: []\n", "kind \"Deployment\""},
		"unknown field of list": {"apiVersion: v1\nkind: List\nitem: []\nitems: []\n", "3 List: unknown field \"item\" of a list"},
		"anchor in itself":      {"apiVersion: v1\nkind: Pod\nmetadata: &m\n  name: web\n  labels: *m\n", "Pod default/web"},
		"null key":              {svcHead + "  ~: a\n", "a key that is not a plain value"},
		"tag":                   {"apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels: {a: !thing b}\n", "the tag !thing means nothing here"},
	} {
		t.Run(name, func(t *testing.T) {
			good := "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: good}\n"
			p := parse(c.text + good)
			if got := faults(p); !strings.Contains(got, c.want) {
				t.Errorf("faults:\n%s\nwant\n%s", got, c.want)
			}
			if len(p.objects) != 1 || p.objects[0].key.name != "good" {
				t.Errorf("the good document beside it gave %v", p.objects)
			}
			// Lines count from the beginning of the file.
			shifted := parse(good + "---\n" + c.text)
			if len(shifted.faults) == 0 || len(p.faults) == 0 || shifted.faults[0].line != p.faults[0].line+5 {
				t.Errorf("five lines further down:\n%s\nbefore\n%s", faults(shifted), faults(p))
			}
		})
	}
}

func TestGoodManifests(t *testing.T) {
	p := parse(`# a comment before everything
%YAML 1.1
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Service
  metadata: {name: web, uid: given, resourceVersion: "77", managedFields: [{manager: kubectl}]}
  spec:
    clusterIPs: [10.98.235.247, "fd00:10:98::1"]
    ports: [{port: 80, targetPort: 8080}]
- apiVersion: v1
  kind: Pod
  metadata: {name: web, namespace: other}
  spec: {hostNetwork: no, containers: [{name: c, ports: [{containerPort: 8080}]}]}
  status: {podIP: 10.244.80.65}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicyList
items:
- metadata: {name: p}
  spec: {podSelector: {}, egress: [{ports: [{port: 53}]}]}
--- # nothing in it

---
{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"},
	"spec": {"podCIDR": "10.244.80.0/24"}}
...
---
x: &labels {app: web}
apiVersion: v1
`)
	// The last document is bad on purpose: it begins behind a "..." line.
	if len(p.faults) != 1 || p.faults[0].line != 31 {
		t.Errorf("faults:\n%s", faults(p))
	}
	got := map[string]object{}
	for _, m := range p.objects {
		got[m.key.String()] = m.obj
	}
	if len(got) != 4 {
		t.Fatalf("objects %v", keysOf(got))
	}
	svc := got["Service default/web"].(*corev1.Service)
	if svc.UID != "given" || svc.ResourceVersion != "" || svc.ManagedFields != nil || svc.Spec.ClusterIP != "10.98.235.247" ||
		svc.Spec.Ports[0].Protocol != "TCP" || len(svc.Spec.IPFamilies) != 2 || svc.Spec.Type != "ClusterIP" || *svc.Spec.InternalTrafficPolicy != "Cluster" {
		t.Errorf("service %+v", svc)
	}
	pod := got["Pod other/web"].(*corev1.Pod)
	if pod.UID == "" || pod.Status.PodIPs[0].IP != "10.244.80.65" || pod.Spec.Containers[0].Ports[0].Protocol != "TCP" {
		t.Errorf("pod %+v", pod)
	}
	if again := parse("apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: other}\n"); again.objects[0].obj.GetUID() != pod.UID {
		t.Error("the UID of a pod changed with its text")
	}
	policy := got["NetworkPolicy default/p"].(*networkingv1.NetworkPolicy)
	if len(policy.Spec.PolicyTypes) != 2 || *policy.Spec.Egress[0].Ports[0].Protocol != "TCP" {
		t.Errorf("policy %+v", policy.Spec)
	}
}

// Services of every type, as short as they can be written, and what stands in
// the tables of them.
func TestServiceTypes(t *testing.T) {
	p := parse(`apiVersion: v1
kind: Service
metadata: {name: np}
spec: {type: NodePort, clusterIP: 10.98.0.1, ports: [{port: 80, nodePort: 30080}], sessionAffinity: ClientIP}
---
apiVersion: v1
kind: Service
metadata: {name: lb}
spec:
  type: LoadBalancer
  clusterIPs: [10.98.0.2, "fd00:10:98::2"]
  ports: [{port: 80}]
  externalTrafficPolicy: Local
  healthCheckNodePort: 31000
  externalIPs: [198.51.100.1]
  loadBalancerSourceRanges: [" 203.0.113.0/24 "]
status: {loadBalancer: {ingress: [{ip: 192.0.2.1}, {ip: 192.0.2.2, ipMode: Proxy}, {hostname: lb.example.com}]}}
`)
	if len(p.faults) != 0 || len(p.objects) != 2 {
		t.Fatal(faults(p))
	}
	np, lb := trimService(p.objects[0].obj.(*corev1.Service)), trimService(p.objects[1].obj.(*corev1.Service))
	if np.Spec.ExternalTrafficPolicy != "Cluster" || np.Spec.Ports[0].NodePort != 30080 ||
		*np.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != 10800 || np.Spec.Ports[0].Protocol != "TCP" {
		t.Errorf("NodePort %+v", np.Spec)
	}
	in := lb.Status.LoadBalancer.Ingress
	if lb.Spec.ExternalTrafficPolicy != "Local" || lb.Spec.HealthCheckNodePort != 31000 || len(lb.Spec.ExternalIPs) != 1 ||
		!*lb.Spec.AllocateLoadBalancerNodePorts || len(lb.Spec.LoadBalancerSourceRanges) != 1 ||
		len(in) != 3 || *in[0].IPMode != "VIP" || *in[1].IPMode != "Proxy" || in[2].IPMode != nil {
		t.Errorf("LoadBalancer %+v %+v", lb.Spec, in)
	}
}

func TestAnchorsAndMerges(t *testing.T) {
	p := parse(`apiVersion: v1
kind: Pod
metadata:
  name: web
  labels: &l {app: web, tier: front}
  annotations:
    <<: *l
    tier: back
`)
	if len(p.faults) != 0 {
		t.Fatal(faults(p))
	}
	if a := p.objects[0].obj.GetAnnotations(); a["app"] != "web" || a["tier"] != "back" || len(a) != 2 {
		t.Errorf("merged: %v", a)
	}

	// Aliases of aliases must not fill the memory.
	bomb := "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  x0: &x0 [aaaaaaaaaaaaaaaa]\n"
	for i := 1; i < 12; i++ {
		bomb += fmt.Sprintf("  x%d: &x%d [%s*x%d]\n", i, i, strings.Repeat(fmt.Sprintf("*x%d, ", i-1), 9), i-1)
	}
	if got := faults(parse(bomb)); !strings.Contains(got, "aliases written out") {
		t.Errorf("a bomb of aliases gave %.300s", got)
	}
}

func FuzzParseManifests(f *testing.F) {
	f.Add(svcHead + "  clusterIP: 10.98.0.1\n  ports: [{port: 80}]\n")
	f.Add("apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod, metadata: {name: a}}\n---\n%YAML 1.1\n---\na: *b\n...\n")
	f.Add("apiVersion: v1\nkind: Pod\nmetadata: &m {name: y, labels: {<<: *m, a: !!binary b, c: 0o7, d: .nan, ? [e] : f}}\n")
	f.Add("{\"apiVersion\": \"v1\",\n\t\"kind\": \"Node\", \"metadata\": {\"name\": \"a\"}}")
	f.Add("--- \n--- |\n---\ttext\n\r\n---")
	f.Fuzz(func(t *testing.T, text string) {
		p := parse(text)
		lines := strings.Count(text, "\n") + 2
		for _, bad := range p.faults {
			if bad.line < 1 || bad.line > lines || bad.err.Error() == "" {
				t.Errorf("fault at line %d of %d: %v", bad.line, lines, bad.err)
			}
			if bad.key.name == "" && !p.opaque {
				t.Errorf("nobody can tell what %v is about, yet the file is not opaque", bad.err)
			}
		}
		for _, m := range p.objects {
			if m.obj.GetName() != m.key.name || m.obj.GetNamespace() != m.key.namespace || m.obj.GetUID() == "" {
				t.Errorf("object %s is %s/%s, UID %q", m.key, m.obj.GetNamespace(), m.obj.GetName(), m.obj.GetUID())
			}
			// What was read well is still good when written and read again.
			out, err := yaml.Marshal(m.obj)
			if err != nil {
				t.Fatal(err)
			}
			if again := parse(string(out)); len(again.faults) != 0 || len(again.objects) != 1 {
				t.Errorf("%s, read well and written as\n%s\ngives\n%s", m.key, out, faults(again))
			}
		}
	})
}
