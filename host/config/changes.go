package config

import (
	"reflect"
	"slices"
	"strings"
)

// reloaded are the keys that a running daemon reads again on SIGHUP. The
// files of tls are read again whenever they change.
var reloaded = []string{"peers", "peer_cidrs", "log_level"}

// Ignored returns the keys by which a file that was read again differs from the running
// configuration c, and which take effect only at the next start, in the order of the file
// format. Deadlines, bounds and tls are named by their own keys, such as bounds.engines.
func (c *Config) Ignored(again *Config) []string {
	a, b := *c, *again
	if a.Bounds.ParkedBytes == a.SlabBytes/2 && b.Bounds.ParkedBytes == b.SlabBytes/2 {
		a.Bounds.ParkedBytes, b.Bounds.ParkedBytes = 0, 0 // it follows slab_bytes
	}
	return differences(nil, "", reflect.ValueOf(a), reflect.ValueOf(b))
}

func differences(keys []string, path string, a, b reflect.Value) []string {
	for i := range a.NumField() {
		key, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
		if key == "" || key == "-" || path == "" && slices.Contains(reloaded, key) {
			continue
		}
		key = path + key
		x, y := a.Field(i), b.Field(i)
		switch {
		case reflect.DeepEqual(x.Interface(), y.Interface()):
		case x.Kind() == reflect.Struct:
			keys = differences(keys, key+".", x, y)
		case x.Kind() == reflect.Pointer && !x.IsNil() && !y.IsNil():
			keys = differences(keys, key+".", x.Elem(), y.Elem())
		default:
			keys = append(keys, key)
		}
	}
	return keys
}
