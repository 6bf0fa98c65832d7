package realcluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// pki signs what the parts of a cluster show each other.
type pki struct {
	dir  string
	ca   *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

func newPKI(dir string) (*pki, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	p := &pki{dir: dir}
	var err error
	if p.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, err
	}
	p.ca = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "podweir-test-ca"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, p.ca, p.ca, p.key.Public(), p.key)
	if err != nil {
		return nil, err
	}
	if p.ca, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	p.next = 2
	return p, errors.Join(p.write("ca.crt", "CERTIFICATE", der), p.writeKey("ca.key", p.key))
}

func (p *pki) path(name string) string { return filepath.Join(p.dir, name) }

func (p *pki) write(name, kind string, der []byte) error {
	return os.WriteFile(p.path(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

func (p *pki) writeKey(name string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return p.write(name, "PRIVATE KEY", der)
}

// pair makes name.crt and name.key, for clients and for servers of the hosts.
func (p *pki) pair(name, user, group string, hosts ...string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(p.next), Subject: pkix.Name{CommonName: user}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		NotBefore:   p.ca.NotBefore, NotAfter: p.ca.NotAfter,
	}
	p.next++
	if group != "" {
		cert.Subject.Organization = []string{group}
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			cert.IPAddresses = append(cert.IPAddresses, ip)
		} else {
			cert.DNSNames = append(cert.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, p.ca, key.Public(), p.key)
	if err != nil {
		return err
	}
	return errors.Join(p.write(name+".crt", "CERTIFICATE", der), p.writeKey(name+".key", key))
}

// signer makes name.key and name.pub, which service account tokens are signed
// and checked with.
func (p *pki) signer(name string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return errors.Join(p.writeKey(name+".key", key), p.write(name+".pub", "PUBLIC KEY", der))
}

// certificates makes all pairs and the kubeconfigs that use them.
func (c Config) certificates() error {
	p, err := newPKI(c.cp("pki"))
	if err != nil {
		return err
	}
	const svc = "kubernetes.default.svc"
	errs := []error{
		p.signer("sa"),
		p.pair("apiserver", "kube-apiserver", "", "kubernetes", "kubernetes.default", svc, svc+"."+domain, "localhost", "127.0.0.1", apiVIP, hostIP, hostIP6),
		p.pair("apiserver-kubelet", "kube-apiserver-kubelet-client", "system:masters"),
		p.pair("front-proxy", "front-proxy-client", ""),
	}
	user := func(name, user, group string, hosts ...string) {
		errs = append(errs, p.pair(name, user, group, hosts...), os.WriteFile(c.kubeconfig(name), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: podweir, cluster: {server: "%s", certificate-authority: "%s"}}]
users: [{name: %s, user: {client-certificate: "%s", client-key: "%s"}}]
contexts: [{name: podweir, context: {cluster: podweir, user: %[3]s}}]
current-context: podweir
`, apiserver, p.path("ca.crt"), name, p.path(name+".crt"), p.path(name+".key")), 0o600))
	}
	user("controller-manager", "system:kube-controller-manager", "")
	user("kube-proxy", "system:kube-proxy", "")
	user("scheduler", "system:kube-scheduler", "")
	for _, n := range c.nodes() {
		user("node-"+n.Name, "system:node:"+n.Name, "system:nodes", n.Name, n.IP, n.IP6)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// The last: who finds it finds all of them.
	user("admin", "admin", "system:masters")
	return errors.Join(errs...)
}
