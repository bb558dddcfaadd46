package evidence

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/registry"
)

// testKey is a key whose secret everybody knows.
func testKey(b byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{b}, ed25519.SeedSize))
}

func public(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

func keys(ks ...ed25519.PrivateKey) (out []ed25519.PublicKey) {
	for _, k := range ks {
		out = append(out, public(k))
	}
	return out
}

func certified(t testing.TB) []byte {
	data, err := Certify(accepted(), "v1.2.3", testKey(1))
	require.NoError(t, err)
	return data
}

// here is what a node is about to judge: the same, before the check.
func here() *registry.Verdict {
	v := accepted()
	w := &registry.Verdict{Model: v.Model, Engine: v.Engine, DeploymentDigest: v.DeploymentDigest, RulesDigest: v.RulesDigest, Checker: v.Checker, Rules: v.Rules}
	w.Domain.Seed, w.Domain.PromptTokens = v.Domain.Seed, v.Domain.PromptTokens
	return w
}

func TestCertificate(t *testing.T) {
	data := certified(t)
	require.Equal(t, data, certified(t), "ed25519 has no randomness")
	golden(t, "certificate.json", data)
	var e envelope
	require.NoError(t, json.Unmarshal(data, &e))
	payload, err := base64.StdEncoding.DecodeString(e.Payload)
	require.NoError(t, err)
	var pretty bytes.Buffer
	require.NoError(t, json.Indent(&pretty, payload, "", "  "))
	golden(t, "certificate.statement.json", append(pretty.Bytes(), '\n'))

	c, err := OpenCertificate(data, keys(testKey(2), testKey(1)))
	require.NoError(t, err)
	require.Equal(t, KeyID(public(testKey(1))), c.KeyID)
	v, differences := c.Against(here())
	require.Empty(t, differences)
	want := accepted()
	want.Certificate, want.Seconds, want.LoadSeconds = c.KeyID, 0, 0
	require.Equal(t, want, v)
}

// The example of the DSSE specification.
func TestPAE(t *testing.T) {
	require.Equal(t, "DSSEv1 29 http://example.com/HelloWorld 11 hello world", string(pae("http://example.com/HelloWorld", []byte("hello world"))))
}

// TestTampering: whatever byte of a certificate is changed, to whatever, it is not accepted,
// or it says what was signed: spaces and the key's id are nobody's word.
func TestTampering(t *testing.T) {
	data := certified(t)
	whole, err := OpenCertificate(data, keys(testKey(1)))
	require.NoError(t, err)
	accepted := 0
	for i := range data {
		for _, b := range []byte{data[i] ^ 1, data[i] ^ 0x20, ' ', 'A'} {
			if b == data[i] {
				continue
			}
			changed := bytes.Clone(data)
			changed[i] = b
			if c, err := OpenCertificate(changed, keys(testKey(1))); err == nil {
				accepted++
				require.Equal(t, whole, c, "byte %d to %q", i, b)
			}
		}
	}
	require.Less(t, accepted, 4*(len(`"keyid":"sha256:"`)+64+60), "keys' names, the key's id, the last newline")
	var e envelope
	require.NoError(t, json.Unmarshal(data, &e))
	payload, err := base64.StdEncoding.DecodeString(e.Payload)
	require.NoError(t, err)
	for i := range payload { // under the signature of the true one
		changed := bytes.Clone(payload)
		changed[i] ^= 1
		f := e
		f.Payload = base64.StdEncoding.EncodeToString(changed)
		again, err := json.Marshal(f)
		require.NoError(t, err)
		_, err = OpenCertificate(again, keys(testKey(1)))
		require.ErrorContains(t, err, "its signature is by none of the 1 configured keys", "byte %d", i)
	}
}

func TestKeysThatDoNotCount(t *testing.T) {
	data := certified(t)
	for _, ks := range [][]ed25519.PublicKey{nil, keys(testKey(2)), {nil}, {public(testKey(1))[:31]}} {
		_, err := OpenCertificate(data, ks)
		require.ErrorContains(t, err, "its signature is by none")
	}
}

// sign signs a statement that Certify would not write.
func sign(t testing.TB, change func(*Statement)) []byte {
	c, err := OpenCertificate(certified(t), keys(testKey(1)))
	require.NoError(t, err)
	change(&c.Statement)
	payload, err := json.Marshal(&c.Statement)
	require.NoError(t, err)
	data, err := seal(payload, testKey(1))
	require.NoError(t, err)
	return data
}

// subjectsToo makes the subjects those of the changed predicate.
func subjectsToo(change func(*Predicate)) func(*Statement) {
	return func(s *Statement) {
		change(&s.Predicate)
		s.Subject = s.Predicate.subjects()
	}
}

// TestSignedButNoCertificate: a right signature does not make a certificate of what is none.
func TestSignedButNoCertificate(t *testing.T) {
	for want, change := range map[string]func(*Statement){
		`its verdict is "refused"`:                subjectsToo(func(p *Predicate) { p.Verdict = registry.Refused }),
		`its verdict is "undecided"`:              subjectsToo(func(p *Predicate) { p.Verdict = registry.Undecided }),
		`its verdict is ""`:                       subjectsToo(func(p *Predicate) { p.Verdict = "" }),
		`its _type is`:                            func(s *Statement) { s.Type = "https://in-toto.io/Statement/v0.1" },
		`its predicateType is`:                    func(s *Statement) { s.PredicateType = "https://github.com/tierd/tierd/pair/v1" },
		`speaks of 0 rules`:                       subjectsToo(func(p *Predicate) { p.Rules = nil }),
		`and 0 cases`:                             subjectsToo(func(p *Predicate) { p.Cases, p.Relations = 0, nil }),
		`60 cases, but its relations of 50`:       subjectsToo(func(p *Predicate) { p.Relations = map[string]uint64{"covers": 50} }),
		`its seed is 2, but its domain's is 1`:    subjectsToo(func(p *Predicate) { p.Seed = 2 }),
		`the digest of checker is "sha256:d3"`:    subjectsToo(func(p *Predicate) { p.Checker.Digest = "sha256:d3" }),
		`the digest of deployment is "md5:00"`:    subjectsToo(func(p *Predicate) { p.DeploymentDigest = "md5:00" }),
		`the digest of rule mine is ""`:           subjectsToo(func(p *Predicate) { p.Rules[0].Digest = "" }),
		`its subjects are not the deployment`:     func(s *Statement) { s.Subject[1].Digest["sha256"] = strings.Repeat("00", 32) },
		`its subjects are not the deployment and`: func(s *Statement) { s.Subject = s.Subject[:2] },
	} {
		_, err := OpenCertificate(sign(t, change), keys(testKey(1)))
		require.ErrorContains(t, err, want)
	}
	for name, payload := range map[string]string{"array": "[]", "nothing": "", "text": "hello", "two": `{}{}`} {
		data, err := seal([]byte(payload), testKey(1))
		require.NoError(t, err)
		_, err = OpenCertificate(data, keys(testKey(1)))
		require.Error(t, err, name)
	}
}

// TestOfSomethingElse: a certificate of anything but what the node is about to judge says
// every difference, with both values.
func TestOfSomethingElse(t *testing.T) {
	open := func(change func(*Statement)) *Certificate {
		c, err := OpenCertificate(sign(t, change), keys(testKey(1)))
		require.NoError(t, err)
		return c
	}
	for _, c := range []struct {
		want   []string
		change func(*Predicate)
	}{
		{[]string{"model: other in the certificate, gpt-oss here"}, func(p *Predicate) { p.Model = "other" }},
		{[]string{"engine: vllm-0.30 in the certificate, tierd here"}, func(p *Predicate) { p.Engine = "vllm-0.30" }},
		{[]string{"deployment digest: " + digest("00") + " in the certificate, " + digest("d1") + " here"}, func(p *Predicate) { p.DeploymentDigest = digest("00") }},
		{[]string{"rules digest: " + digest("00") + " in the certificate, " + digest("d2") + " here"}, func(p *Predicate) { p.RulesDigest = digest("00") }},
		{[]string{"checker digest: " + digest("00") + " in the certificate, " + digest("d3") + " here"}, func(p *Predicate) { p.Checker.Digest = digest("00") }},
		{[]string{"digest of the rule of sliding: " + digest("00") + " in the certificate, " + digest("e1") + " here"}, func(p *Predicate) { p.Rules[0].Digest = digest("00") }},
		{[]string{"parameters of the rule of sliding: map[extra:0 window:21] in the certificate, map[extra:0 window:20] here"}, func(p *Predicate) { p.Rules[0].Params["window"] = 21 }},
		{[]string{"rule of full: full 1.0.0 of fuller in the certificate, full 1.0.0 of full here"}, func(p *Predicate) { p.Rules[1].For = "fuller" }},
		{[]string{"number of rules: 3 in the certificate, 4 here"}, func(p *Predicate) { p.Rules = p.Rules[:3] }},
		{[]string{"seed: 7 in the certificate, 1 here"}, func(p *Predicate) { p.Seed, p.Domain.Seed = 7, 7 }},
		{[]string{"longest prompt: 255 in the certificate, 256 here"}, func(p *Predicate) { p.Domain.PromptTokens = 255 }},
	} {
		v, differences := open(subjectsToo(c.change)).Against(here())
		require.Nil(t, v)
		var got []string
		for _, d := range differences {
			got = append(got, d.String())
		}
		require.Equal(t, c.want, got)
	}
	v, differences := open(func(*Statement) {}).Against(&registry.Verdict{})
	require.Nil(t, v)
	require.GreaterOrEqual(t, len(differences), 7)
}

// Only an accepted verdict on one deployment has a certificate.
func TestNoCertificate(t *testing.T) {
	for want, change := range map[string]func(*registry.Verdict){
		"the verdict is refused":   func(v *registry.Verdict) { *v = *refused() },
		"the verdict is undecided": func(v *registry.Verdict) { v.Verdict = registry.Undecided },
		"a pair of deployments":    func(v *registry.Verdict) { v.Against = &registry.Side{} },
		"the digest of rule mine":  func(v *registry.Verdict) { v.Rules[0].Digest = "sha256:mine" },
		"and 0 cases":              func(v *registry.Verdict) { v.Cases, v.Relations = 0, nil },
	} {
		v := accepted()
		change(v)
		_, err := Certify(v, "v1", testKey(1))
		require.ErrorContains(t, err, want)
	}
	_, err := Certify(accepted(), "v1", ed25519.PrivateKey{})
	require.Error(t, err)
	v := accepted()
	v.DomainText = []string{strings.Repeat("x", CertificateBytesMax)}
	_, err = Certify(v, "v1", testKey(1))
	require.ErrorContains(t, err, "at most 1048576 are read")
}

func TestLimitsOfAnEnvelope(t *testing.T) {
	_, err := OpenCertificate(bytes.Repeat([]byte(" "), CertificateBytesMax+1), nil)
	require.ErrorContains(t, err, "it has 1048577 bytes; a certificate has at most 1048576")
	var e envelope
	require.NoError(t, json.Unmarshal(certified(t), &e))
	one := e.Signatures[0]
	with := func(n int) error {
		e.Signatures = nil
		for range n - 1 {
			e.Signatures = append(e.Signatures, signature{"", "AAAA"})
		}
		if n > 0 {
			e.Signatures = append(e.Signatures, one)
		}
		data, err := json.Marshal(e)
		require.NoError(t, err)
		_, err = OpenCertificate(data, keys(testKey(1)))
		return err
	}
	require.NoError(t, with(signaturesMax), "others may have signed it, too")
	require.ErrorContains(t, with(signaturesMax+1), "it has 17 signatures; a certificate has 1 to 16")
	require.ErrorContains(t, with(0), "it has 0 signatures")
	e.PayloadType = "text/plain"
	require.ErrorContains(t, with(1), `its payloadType is "text/plain"`)
}

func TestKeyFiles(t *testing.T) {
	private, pub, err := EncodeKey(testKey(1))
	require.NoError(t, err)
	k, err := ParsePrivateKey(private)
	require.NoError(t, err)
	require.Equal(t, testKey(1), k)
	p, err := ParsePublicKey(pub)
	require.NoError(t, err)
	require.Equal(t, public(testKey(1)), p)

	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(other)
	require.NoError(t, err)
	for want, data := range map[string][]byte{
		`it is no PEM file`:                    []byte("hello"),
		`it holds a block "PUBLIC KEY"`:        pub,
		`it holds more than one block`:         append(bytes.Clone(private), private...),
		`it holds a *ecdsa.PrivateKey`:         pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		`it holds a block "EC PRIVATE KEY"`:    pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
		`asn1: structure error: tags don't ma`: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("hello, hello")}),
	} {
		_, err := ParsePrivateKey(data)
		require.ErrorContains(t, err, want)
	}
	_, err = ParsePublicKey(private)
	require.ErrorContains(t, err, `it must hold one block "PUBLIC KEY"`)
}

// FuzzOpenCertificate: no bytes make it panic, and what it accepts was signed and is whole.
func FuzzOpenCertificate(f *testing.F) {
	f.Add(certified(f))
	f.Add(sign(f, func(s *Statement) { s.Predicate.Verdict = registry.Refused }))
	f.Add([]byte(`{"payloadType":"application/vnd.in-toto+json","payload":"e30=","signatures":[{"sig":""}]}`))
	whole, err := OpenCertificate(certified(f), keys(testKey(1)))
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, data []byte) {
		if c, err := OpenCertificate(data, keys(testKey(1))); err == nil {
			require.Equal(t, whole, c)
		}
	})
}

// FuzzStatement: no signed payload makes it panic, whatever it says.
func FuzzStatement(f *testing.F) {
	var e envelope
	require.NoError(f, json.Unmarshal(certified(f), &e))
	payload, err := base64.StdEncoding.DecodeString(e.Payload)
	require.NoError(f, err)
	f.Add(payload)
	f.Add([]byte(`{"predicate":{"rules":[{}],"relations":{"x":1}}}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		data, err := seal(payload, testKey(1))
		require.NoError(t, err)
		c, err := OpenCertificate(data, keys(testKey(1)))
		if err != nil {
			return
		}
		require.NoError(t, c.Statement.check())
		if v, differences := c.Against(here()); differences == nil {
			require.Equal(t, registry.Accepted, v.Verdict)
			require.Equal(t, digest("d3"), v.Checker)
		}
	})
}
