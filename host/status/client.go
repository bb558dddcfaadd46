package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Path of the status on the HTTP port.
const Path = "/statusz"

const (
	// bytesMax bounds what is read of an answer: a status of a thousand peers has a few
	// hundred KiB, and what answers may be no tierd at all.
	bytesMax = 16 << 20
	// Timeout is how long an answer may take. A daemon needs milliseconds for it, so one
	// that has not answered by then is stopped or overloaded.
	Timeout = 5 * time.Second
)

// Locate returns where the daemon that uses a state directory answers.
func Locate(stateDir string) (a Address, err error) {
	path := filepath.Join(stateDir, AddressFile)
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return a, fmt.Errorf("no daemon runs with state directory %s (there is no %s in it); start one with tierd serve, or correct the directory", stateDir, AddressFile)
	case err != nil:
		return a, fmt.Errorf("state directory %s: %w; run this as the daemon's user", stateDir, err)
	}
	if err = json.Unmarshal(data, &a); err == nil && a.HTTPListen == "" {
		err = errors.New("it has no http_listen")
	}
	if err != nil {
		return a, fmt.Errorf("%s does not say where a daemon answers: %w; restart the daemon, which writes it anew", path, err)
	}
	return a, nil
}

// Get asks for the status of the daemon at an address, whose NodeID and PID are known or
// empty. body is the answer as it came. An error says what was tried and what to do.
func Get(ctx context.Context, a Address) (s *Status, body []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	url := "http://" + dialable(a.HTTPListen) + Path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, nil, err
	}
	transport := &http.Transport{DisableKeepAlives: true} // no proxy: it is this machine
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err == nil {
		defer resp.Body.Close()
		body, err = io.ReadAll(io.LimitReader(resp.Body, bytesMax))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("GET %s: %w", url, unreachable(a, err))
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("GET %s: %s: %s", url, resp.Status, strings.TrimSpace(clean(string(body[:min(len(body), 1024)]))))
	}
	s = &Status{}
	if err = json.Unmarshal(body, s); err != nil || s.Form == 0 {
		return nil, nil, fmt.Errorf("GET %s: what answers is no tierd daemon; correct the address", url)
	}
	if a.NodeID != "" && a.NodeID != s.NodeID {
		return nil, nil, fmt.Errorf("GET %s: node %s answers, and not %s; is that address another daemon's?", url, s.NodeID, a.NodeID)
	}
	return s, body, nil
}

// unreachable says what it means that there is no answer.
func unreachable(a Address, err error) error {
	var timeout net.Error
	switch gone := a.PID > 0 && errors.Is(syscall.Kill(a.PID, 0), syscall.ESRCH); {
	case gone:
		return fmt.Errorf("no answer, and process %d, which was node %s, is gone: it was killed; start it again with tierd serve", a.PID, a.NodeID)
	case errors.As(err, &timeout) && timeout.Timeout() && a.PID > 0:
		return fmt.Errorf("no answer within %v: process %d lives, and is stopped (kill -CONT %d lets it go on) or overloaded", Timeout, a.PID, a.PID)
	case errors.As(err, &timeout) && timeout.Timeout():
		return fmt.Errorf("no answer within %v: the daemon is stopped or overloaded, or a firewall is between", Timeout)
	case errors.Is(err, syscall.ECONNREFUSED):
		return errors.New("nobody listens there; start the daemon with tierd serve, or correct the address")
	}
	return err
}

// dialable is an address to connect to: a listener on every address is reached on this
// machine's own.
func dialable(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return listen
	}
	switch ip := net.ParseIP(host); {
	case host == "", ip != nil && ip.IsUnspecified() && ip.To4() != nil:
		host = "127.0.0.1"
	case ip != nil && ip.IsUnspecified():
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}

// Local reports whether a request came from this machine: from a loopback address, or from
// the very address that it was sent to.
func Local(r *http.Request) bool {
	remote, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(remote)
	if ip == nil {
		return false
	}
	if ip.IsLoopback() {
		return true
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && ip.Equal(local.IP)
}

// Line is an answer on one line.
func Line(body []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, body) != nil {
		return body // it was decoded already, so it is JSON
	}
	return b.Bytes()
}
