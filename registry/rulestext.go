package registry

import (
	"bytes"
	"fmt"
	"strings"
)

// RulesText returns the bytes that RulesDigest is of: a line for each rule, the groups in
// file order and then the policies, with its place, name, version, digest and parameter
// values, each ended by a zero byte but the last. [ParseRulesText] reads it.
func (e *Entry) RulesText() []byte {
	var b bytes.Buffer
	for i := range e.rules {
		ru := &e.rules[i]
		fmt.Fprintf(&b, "%s\x00%s\x00%s\x00%s\x00%d\n", ru.For, ru.Name, ru.Version, ru.Digest, ru.values)
	}
	return b.Bytes()
}

// Rules says which rules serve, the groups' in file order and then the policies'.
func (e *Entry) Rules() []RuleID { return e.ruleIDs() }

// ParseRulesText reads what another node's [Entry.RulesText] wrote: of each rule For, Name,
// Version and Digest. That the values are those of a deployment is seen when its rules are
// opened: the entry has the digest of this text or not.
func ParseRulesText(text []byte) ([]RuleID, error) {
	rest, ended := strings.CutSuffix(string(text), "\n")
	if !ended {
		return nil, fmt.Errorf("rules text of %d bytes does not end with a line", len(text))
	}
	var ids []RuleID
	for i, line := range strings.Split(rest, "\n") {
		f := strings.Split(line, "\x00")
		if len(f) != 5 {
			return nil, fmt.Errorf("rules text: line %d has %d fields; a rule has 5", i+1, len(f))
		}
		ids = append(ids, RuleID{For: f[0], Name: f[1], Version: f[2], Digest: f[3]})
	}
	return ids, nil
}
