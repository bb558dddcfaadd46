package transfer

import (
	"log/slog"

	"github.com/tierd/tierd/host/limitlog"
)

// limitedLog writes one line per cause in a window of package limitlog, and says how many
// it left out: a port scanner must not fill a disk.
type limitedLog struct{ *limitlog.Log }

func newLimitedLog(o Options) limitedLog { return limitedLog{limitlog.New(o.Log)} }

// warn writes a line; the cause is its message.
func (l limitedLog) warn(cause string, args ...any) {
	l.Log.Log(slog.LevelWarn, cause, "", cause, args...)
}
