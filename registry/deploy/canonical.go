package deploy

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Canonical returns the bytes that Digest is of: the deployment's JSON form with defaults
// filled in, by which it can be handed on. [ParseCanonical] reads them.
func (d *Deployment) Canonical() []byte { return canonical(d) }

func canonical(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("deploy: a plain struct does not marshal: " + err.Error())
	}
	return b
}

// ParseCanonical reads what [Deployment.Canonical] wrote, on this machine or on another one.
// Bytes that mean a deployment and are not its canonical ones are refused, and so is a key
// that this version does not know: it would not be judged. name stands in messages in the
// place of a file's path.
func ParseCanonical(name string, data []byte) (*Deployment, error) {
	d := &Deployment{file: name}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	dec.DisallowUnknownFields()
	if err := dec.Decode(d); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	for _, params := range d.params() {
		for k, v := range params {
			if n, ok := v.(json.Number); ok {
				i, err := n.Int64()
				if err != nil || int64(int(i)) != i {
					return nil, fmt.Errorf("%s: parameter %s is %s; it must be an integer", name, k, n)
				}
				params[k] = int(i)
			}
		}
	}
	d.defaults()
	if err := d.validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if !bytes.Equal(d.Canonical(), data) {
		return nil, fmt.Errorf("%s: these %d bytes are not the canonical form of the deployment that they describe", name, len(data))
	}
	return d, nil
}

// params are the parameters of all rules.
func (d *Deployment) params() []map[string]any {
	all := []map[string]any{d.EngineParams}
	for i := range d.Groups {
		all = append(all, d.Groups[i].Params)
	}
	for i := range d.Policies {
		all = append(all, d.Policies[i].Params)
	}
	return all
}
