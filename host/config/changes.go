package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Ignored returns the keys by which a file that was read again differs from the running
// configuration c, and which take effect only at the next start, in the order of the file
// format. Deadlines, bounds and tls are named by their own keys, such as bounds.engines.
func (c *Config) Ignored(again *Config) []string {
	a, b := *c, *again
	if a.Bounds.ParkedBytes == a.SlabBytes/2 && b.Bounds.ParkedBytes == b.SlabBytes/2 {
		a.Bounds.ParkedBytes, b.Bounds.ParkedBytes = 0, 0 // it follows slab_bytes
	}
	// What a running daemon reads again. The files of tls are read whenever they change.
	a.Peers, a.PeerCIDRs, a.LogLevel = b.Peers, b.PeerCIDRs, b.LogLevel
	return Differences(a, b)
}

// Differences returns the keys by which two values of one file format differ, in the order of
// the format: down to the single key of an object, such as tls.key, and of the objects of two
// lists that are as long as each other, such as groups[1].params.window.
func Differences[F any](a, b F) []string {
	return differences(nil, "", reflect.ValueOf(a), reflect.ValueOf(b))
}

func differences(keys []string, path string, a, b reflect.Value) []string {
	switch {
	case reflect.DeepEqual(a.Interface(), b.Interface()):
	case a.Kind() == reflect.Struct:
		for i := range a.NumField() {
			key, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
			if key != "" && key != "-" {
				keys = differences(keys, strings.TrimPrefix(path+"."+key, "."), a.Field(i), b.Field(i))
			}
		}
	case a.Kind() == reflect.Pointer && !a.IsNil() && !b.IsNil():
		keys = differences(keys, path, a.Elem(), b.Elem())
	case a.Kind() == reflect.Slice && a.Type().Elem().Kind() == reflect.Struct && a.Len() == b.Len():
		for i := range a.Len() {
			keys = differences(keys, fmt.Sprintf("%s[%d]", path, i), a.Index(i), b.Index(i))
		}
	case a.Type() == reflect.TypeFor[map[string]any]() && a.Len() > 0 && b.Len() > 0:
		x, y := a.Interface().(map[string]any), b.Interface().(map[string]any)
		all := maps.Clone(x)
		maps.Copy(all, y)
		for _, k := range slices.Sorted(maps.Keys(all)) {
			v, here := x[k]
			w, there := y[k]
			if here != there || !reflect.DeepEqual(v, w) {
				keys = append(keys, path+"."+k)
			}
		}
	default:
		keys = append(keys, path)
	}
	return keys
}
