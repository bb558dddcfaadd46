package evidence

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
)

// payloadType of an in-toto statement in an envelope.
const payloadType = "application/vnd.in-toto+json"

// Limits of an envelope and of a key, for a reader that does not trust it.
const (
	// CertificateBytesMax: a certificate of 64 groups has some 60 KiB.
	CertificateBytesMax = 1 << 20
	// KeyBytesMax: a PEM file with an ed25519 key has 119 bytes, and may have comments.
	KeyBytesMax = 64 << 10
	// signaturesMax bounds how many signatures are tried with each key.
	signaturesMax = 16
)

// An envelope is a DSSE envelope, version 1 of its specification.
type envelope struct {
	PayloadType string      `json:"payloadType"`
	Payload     string      `json:"payload"`
	Signatures  []signature `json:"signatures"`
}

type signature struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"`
}

// pae is DSSE's pre-authentication encoding, which is what is signed: the payload's type is
// part of it, so that bytes signed as one type cannot be passed off as another.
func pae(kind string, payload []byte) []byte {
	return fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(kind), kind, len(payload), payload)
}

// seal signs a payload.
func seal(payload []byte, key ed25519.PrivateKey) ([]byte, error) {
	if len(key) != ed25519.PrivateKeySize { // Sign panics
		return nil, fmt.Errorf("the key has %d bytes; an ed25519 key has %d", len(key), ed25519.PrivateKeySize)
	}
	public := ed25519.PublicKey(key[ed25519.PrivateKeySize-ed25519.PublicKeySize:])
	return json.Marshal(envelope{payloadType, base64.StdEncoding.EncodeToString(payload),
		[]signature{{KeyID(public), base64.StdEncoding.EncodeToString(ed25519.Sign(key, pae(payloadType, payload)))}}})
}

// unseal returns the payload of an envelope that one of the keys has signed, and the key's
// id. The ids that the envelope gives are hints that nobody signed: every key is tried.
func unseal(data []byte, keys []ed25519.PublicKey) (payload []byte, keyID string, err error) {
	if len(data) > CertificateBytesMax {
		return nil, "", fmt.Errorf("it has %d bytes; a certificate has at most %d", len(data), CertificateBytesMax)
	}
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, "", fmt.Errorf("it is no DSSE envelope: %w", err)
	}
	if e.PayloadType != payloadType {
		return nil, "", fmt.Errorf("its payloadType is %q; that of a certificate is %q", e.PayloadType, payloadType)
	}
	if payload, err = fromBase64(e.Payload); err != nil {
		return nil, "", fmt.Errorf("its payload is not base64: %w", err)
	}
	if n := len(e.Signatures); n == 0 || n > signaturesMax {
		return nil, "", fmt.Errorf("it has %d signatures; a certificate has 1 to %d", n, signaturesMax)
	}
	signed := pae(e.PayloadType, payload)
	for _, s := range e.Signatures {
		sig, err := fromBase64(s.Sig)
		if err != nil || len(sig) != ed25519.SignatureSize {
			continue
		}
		for _, k := range keys {
			if len(k) == ed25519.PublicKeySize && ed25519.Verify(k, signed, sig) {
				return payload, KeyID(k), nil
			}
		}
	}
	return nil, "", fmt.Errorf("its signature is by none of the %d configured keys, or it was changed after it was signed", len(keys))
}

// fromBase64 takes both alphabets, as DSSE asks, and nothing after the padding.
func fromBase64(s string) ([]byte, error) {
	b, err := base64.StdEncoding.Strict().DecodeString(s)
	if err != nil {
		b, err = base64.URLEncoding.Strict().DecodeString(s)
	}
	return b, err
}

// KeyID names a public key: "sha256:" and the digest of its PKIX form, which is what
// openssl pkey -pubin -outform DER prints.
func KeyID(k ed25519.PublicKey) string {
	der, err := x509.MarshalPKIXPublicKey(k)
	if err != nil {
		panic("evidence: an ed25519 key does not marshal: " + err.Error())
	}
	sum := sha256.Sum256(der)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// ParsePrivateKey reads a PEM file with an ed25519 key in PKCS #8 form.
func ParsePrivateKey(data []byte) (ed25519.PrivateKey, error) {
	block, err := pemBlock(data, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	k, err := x509.ParsePKCS8PrivateKey(block)
	if err != nil {
		return nil, err
	}
	key, ok := k.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("it holds a %T; a certificate is signed by an ed25519 key", k)
	}
	return key, nil
}

// ParsePublicKey reads a PEM file with an ed25519 key in PKIX form.
func ParsePublicKey(data []byte) (ed25519.PublicKey, error) {
	block, err := pemBlock(data, "PUBLIC KEY")
	if err != nil {
		return nil, err
	}
	k, err := x509.ParsePKIXPublicKey(block)
	if err != nil {
		return nil, err
	}
	key, ok := k.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("it holds a %T; a certificate is signed by an ed25519 key", k)
	}
	return key, nil
}

// pemBlock returns the bytes of the one PEM block of a file.
func pemBlock(data []byte, kind string) ([]byte, error) {
	block, rest := pem.Decode(data)
	switch {
	case block == nil:
		return nil, fmt.Errorf("it is no PEM file; it must hold one block %q", kind)
	case block.Type != kind:
		return nil, fmt.Errorf("it holds a block %q; it must hold one block %q", block.Type, kind)
	case len(bytes.TrimSpace(rest)) > 0:
		return nil, fmt.Errorf("it holds more than one block %q; give each key a file of its own", kind)
	}
	return block.Bytes, nil
}

// EncodeKey returns the two PEM files of a key.
func EncodeKey(key ed25519.PrivateKey) (private, public []byte, err error) {
	p, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	q, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: p}), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: q}), nil
}
