package hfconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Limits of a configuration. They turn a wrong file, or a wrong number in it, into a message
// before it becomes an allocation.
const (
	// FileBytesMax: published configurations have 1 to 100 KiB.
	FileBytesMax = 1 << 20
	// layersMax: the deepest model published has some 130 layers.
	layersMax = 1024
	// dimMax bounds heads and their sizes, as in a deployment.
	dimMax = 1 << 16
	// hiddenMax bounds hidden_size, of which published models have up to 2^14.
	hiddenMax = 1 << 20
	// blockTokensMax bounds a block and a chunk, as in a deployment.
	blockTokensMax = 1 << 16
	// windowMax is the largest parameter of the rules window and chunked.
	windowMax = 1 << 24
	// tokensMax is the longest prompt that a deployment can say.
	tokensMax = 1 << 30
	// ratioMax is the largest parameter of the rule latent.
	ratioMax = 1 << 16
	// shownBytesMax cuts a wrong value in a message.
	shownBytesMax = 60
)

// ErrNotPrefixCacheable is wrapped by the error for a model whose decoder reads an encoder.
var ErrNotPrefixCacheable = errors.New("not prefix-cacheable")

// A config reads the keys of a configuration. It keeps the first error, and what is read
// after that is zero.
type config struct {
	text map[string]json.RawMessage // of text_config
	top  map[string]json.RawMessage
	err  error
}

func open(data []byte) (*config, error) {
	if len(data) > FileBytesMax {
		return nil, fmt.Errorf("more than %d bytes; a model's configuration has some thousand", FileBytesMax)
	}
	c := &config{}
	if err := json.Unmarshal(data, &c.top); err != nil || c.top == nil {
		if err == nil {
			err = errors.New("it is null")
		}
		return nil, fmt.Errorf("not a JSON object: %w; give the config.json of a Hugging Face model", err)
	}
	if raw, ok := c.get("text_config"); ok {
		if err := json.Unmarshal(raw, &c.text); err != nil {
			return nil, fmt.Errorf("text_config is %s; it must be an object", show(raw))
		}
	}
	if c.encoderDecoder() {
		c.fail("is_encoder_decoder is true: cross and encoder attention is %w; only a decoder's KV can be offloaded by prefix", ErrNotPrefixCacheable)
	}
	return c, c.err
}

// encoderDecoder looks in both maps: a decoder's own map says false inside such a model.
func (c *config) encoderDecoder() bool {
	top := config{top: c.top}
	text := config{top: c.text}
	yes := top.boolean("is_encoder_decoder", false) || text.boolean("is_encoder_decoder", false)
	for _, err := range []error{top.err, text.err} {
		if err != nil && c.err == nil {
			c.err = err
		}
	}
	return yes
}

func (c *config) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// get returns a key's value, when it is given and not null.
func (c *config) get(key string) (json.RawMessage, bool) {
	for _, m := range []map[string]json.RawMessage{c.text, c.top} {
		if raw, ok := m[key]; ok && !bytes.Equal(raw, []byte("null")) {
			return raw, true
		}
	}
	return nil, false
}

// at returns a key with the map that it stands in.
func (c *config) at(key string) string {
	if raw, ok := c.text[key]; ok && !bytes.Equal(raw, []byte("null")) {
		return "text_config." + key
	}
	return key
}

func (c *config) has(key string) bool { _, ok := c.get(key); return ok }

// show returns a value as a message shows it.
func show(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		b.Write(raw)
	}
	s := b.String()
	if len(s) > shownBytesMax {
		s = strings.ToValidUTF8(s[:shownBytesMax], "") + " ..."
	}
	if quoted := strconv.Quote(s); quoted != `"`+strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s)+`"` {
		return quoted // it has what a terminal should not see
	}
	return s
}

func (c *config) boolean(key string, absent bool) bool {
	raw, ok := c.get(key)
	if !ok {
		return absent
	}
	var v bool
	if json.Unmarshal(raw, &v) != nil {
		c.fail("%s is %s; it must be true or false", c.at(key), show(raw))
	}
	return v
}

// integer returns a key's value from lo to hi, or absent where it is not given.
func (c *config) integer(key string, lo, hi, absent uint64) uint64 {
	raw, ok := c.get(key)
	if !ok {
		return absent
	}
	v, err := strconv.ParseUint(string(raw), 10, 64)
	if err != nil || v < lo || v > hi {
		c.fail("%s is %s; it must be an integer from %d to %d", c.at(key), show(raw), lo, hi)
		return 0
	}
	return v
}

// must returns a value that has to be given, and is not 0. otherwise says what to do
// besides giving it.
func (c *config) must(key string, hi uint64, otherwise string) uint64 {
	if !c.has(key) {
		if otherwise != "" {
			otherwise = ", " + otherwise
		}
		c.fail("%s is missing; add it%s%s", key, otherwise, c.elsewhere())
	}
	return c.integer(key, 1, hi, 0)
}

// elsewhere says where the keys of the language model may be, when they are not where they
// are looked for.
func (c *config) elsewhere() string {
	if c.text != nil || c.has("num_hidden_layers") {
		return ""
	}
	var maps []string
	for key, raw := range c.top {
		var m map[string]json.RawMessage
		if json.Unmarshal(raw, &m) == nil && m["num_hidden_layers"] != nil {
			maps = append(maps, show(json.RawMessage(strconv.Quote(key))))
		}
	}
	if len(maps) == 0 {
		return ""
	}
	slices.Sort(maps)
	return fmt.Sprintf(" (num_hidden_layers stands in %s: give a file of the language model's map alone)", strings.Join(maps, " and in "))
}

// list returns a list of one value for each layer.
func list[T any](c *config, key string, layers uint64, what string) (values []T, ok bool) {
	raw, ok := c.get(key)
	if !ok {
		return nil, false
	}
	if json.Unmarshal(raw, &values) != nil {
		c.fail("%s is %s; it must be a list of %s", c.at(key), show(raw), what)
		return nil, false
	}
	if uint64(len(values)) != layers {
		c.fail("%s has %d entries, and num_hidden_layers is %d; give one for each layer", c.at(key), len(values), layers)
		return nil, false
	}
	return values, true
}

// text returns a value that is text.
func text(raw json.RawMessage) (s string, ok bool) {
	return s, json.Unmarshal(raw, &s) == nil
}
