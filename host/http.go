package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/tierd/tierd/host/halfopen"
	"github.com/tierd/tierd/host/status"
)

// Limits of the HTTP port, which serves small documents to a scraper and to probes.
const (
	httpHeaderBytesMax = 16 << 10
	httpReadTimeout    = 5 * time.Second
	httpWriteTimeout   = 10 * time.Second
	httpIdleTimeout    = time.Minute
	// httpConnsMax: a scraper or two, probes, and a person. One more ends the oldest of the
	// address that has the most.
	httpConnsMax           = 128
	httpConnsPerAddressMax = 32
)

// fairListener bounds the connections of a port.
type fairListener struct {
	net.Listener
	open *halfopen.Set
}

// Accept implements net.Listener.
func (l fairListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	e, _ := l.open.Add(halfopen.From(c.RemoteAddr()), func() { c.Close() })
	return fairConn{c, e}, nil
}

type fairConn struct {
	net.Conn
	entry *halfopen.Entry
}

// Close implements net.Conn.
func (c fairConn) Close() error {
	c.entry.Done()
	return c.Conn.Close()
}

// newHTTP returns the server of metrics and probes.
//
//	/metrics   Prometheus
//	/healthz   200 while the process runs, also while it checks its deployment
//	/readyz    200 while the engine socket is open and the rules are accepted, else 503
//	           with the reason; the state of peers never matters
//	/statusz   the node's status as JSON, see package status; for this machine only
func (n *Node) newHTTP() *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", n.metrics.Handler())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !n.Ready() {
			http.Error(w, "not ready: "+n.notReady(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "ready: deployment %s is %s, engine socket %s is open\n",
			n.entry.Deployment.Model, n.entry.Verdict.Verdict, n.cfg.EngineSocket)
	})
	mux.HandleFunc("GET "+status.Path, n.serveStatus)
	return &http.Server{
		Handler: mux, MaxHeaderBytes: httpHeaderBytesMax, ReadTimeout: httpReadTimeout, WriteTimeout: httpWriteTimeout, IdleTimeout: httpIdleTimeout,
		ErrorLog: slog.NewLogLogger(n.log.Handler(), slog.LevelDebug),
	}
}

// openHTTP comes before everything that takes time: a daemon that checks for a minute
// answers from its first second.
func (n *Node) openHTTP(context.Context) error {
	l, err := net.Listen("tcp", n.cfg.HTTPListen)
	if err != nil {
		return n.cannotListen("http_listen", n.cfg.HTTPListen, err)
	}
	n.addresses.HTTP = l.Addr().String()
	n.http, n.httpEnded = n.newHTTP(), make(chan struct{})
	go func() {
		defer close(n.httpEnded)
		if err := n.http.Serve(fairListener{l, halfopen.New(httpConnsPerAddressMax, httpConnsMax, 0)}); !errors.Is(err, http.ErrServerClosed) {
			n.log.Error("the http port stopped", "error", err)
		}
	}()
	n.onClose(n.stopHTTP)
	return n.tellAddress()
}

// httpStopWithin is how long a scrape in work may take once everything else has stopped.
const httpStopWithin = time.Second

func (n *Node) stopHTTP() {
	ctx, cancel := context.WithTimeout(context.Background(), httpStopWithin)
	defer cancel()
	if n.http.Shutdown(ctx) != nil {
		_ = n.http.Close()
	}
	<-n.httpEnded
}
