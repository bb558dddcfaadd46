package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Limits of the HTTP port, which serves small documents to a scraper and to probes.
const (
	httpHeaderBytesMax = 16 << 10
	httpReadTimeout    = 5 * time.Second
	httpWriteTimeout   = 10 * time.Second
	httpIdleTimeout    = time.Minute
)

// newHTTP returns the server of metrics and probes.
//
//	/metrics   Prometheus
//	/healthz   200 while the process runs
//	/readyz    200 while the engine socket is open and the rules are accepted; the
//	           state of peers never matters
func (n *Node) newHTTP() *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", n.metrics.Handler())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !n.Ready() {
			http.Error(w, "not ready: starting or stopping", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "ready: deployment %s is %s, engine socket %s is open\n",
			n.entry.Deployment.Model, n.entry.Verdict.Verdict, n.cfg.EngineSocket)
	})
	return &http.Server{
		Handler: mux, MaxHeaderBytes: httpHeaderBytesMax, ReadTimeout: httpReadTimeout, WriteTimeout: httpWriteTimeout, IdleTimeout: httpIdleTimeout,
		ErrorLog: slog.NewLogLogger(n.log.Handler(), slog.LevelDebug),
	}
}

func (n *Node) serveHTTP(l net.Listener) {
	if err := n.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		n.log.Error("the http port stopped", "error", err)
	}
}

func (n *Node) stopHTTP(ctx context.Context) {
	if n.http.Shutdown(ctx) != nil {
		_ = n.http.Close()
	}
}
