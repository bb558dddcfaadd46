package page_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// answerWithin is how long the browser may take for one answer; a page takes milliseconds,
// its start seconds.
const answerWithin = time.Minute

// A browser is a headless Chromium that is spoken to by its DevTools protocol: messages of
// JSON that end in a zero byte, over two pipes. So there is no port and no websocket.
type browser struct {
	t       *testing.T
	to      io.Writer
	session string // of its one tab

	mu      sync.Mutex
	next    int
	waiting map[int]chan message
	events  []message
	gone    chan struct{}
}

type message struct {
	ID        int             `json:"id,omitempty"`
	SessionID string          `json:"sessionId,omitempty"`
	Method    string          `json:"method,omitempty"`
	Params    json.RawMessage `json:"params,omitempty"`
	Result    json.RawMessage `json:"result,omitempty"`
	Error     json.RawMessage `json:"error,omitempty"`
}

// chromium returns the browser's path, or skips the test where there is none. Where
// TIERD_CHROMIUM says "required", as make test does, its absence fails.
func chromium(t *testing.T) string {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	const say = "there is no Chromium here, in which the page could be opened; make need-chromium installs it"
	if os.Getenv("TIERD_CHROMIUM") == "required" {
		t.Fatal(say)
	}
	t.Skip(say)
	return ""
}

// open starts a browser with one empty tab, which ends with the test.
func open(t *testing.T) *browser {
	path := chromium(t)
	theirIn, ourOut, err := os.Pipe()
	require.NoError(t, err)
	ourIn, theirOut, err := os.Pipe()
	require.NoError(t, err)
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
		"--remote-debugging-pipe", "--user-data-dir="+t.TempDir(), "about:blank")
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // 3 and 4, as the flag wants
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	theirIn.Close()
	theirOut.Close()
	b := &browser{t: t, to: ourOut, waiting: map[int]chan message{}, gone: make(chan struct{})}
	go b.read(ourIn)
	t.Cleanup(func() {
		ourOut.Close()
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // with its children, which write to the profile
		_ = cmd.Wait()
		<-b.gone
	})
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var session struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &session)
	b.session = session.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network", "Accessibility", "DOM"} {
		b.call(domain+".enable", nil, nil)
	}
	return b
}

func (b *browser) read(r io.ReadCloser) {
	defer close(b.gone)
	defer r.Close()
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadBytes(0)
		if err != nil {
			return
		}
		var m message
		if json.Unmarshal(line[:len(line)-1], &m) != nil {
			return
		}
		b.mu.Lock()
		if c := b.waiting[m.ID]; c != nil && m.ID != 0 {
			delete(b.waiting, m.ID)
			c <- m
		} else if m.Method != "" {
			b.events = append(b.events, m)
		}
		b.mu.Unlock()
	}
}

// call asks the browser one thing.
func (b *browser) call(method string, params map[string]any, into any) {
	b.t.Helper()
	p, err := json.Marshal(params)
	require.NoError(b.t, err)
	answer := make(chan message, 1)
	b.mu.Lock()
	b.next++
	m := message{ID: b.next, SessionID: b.session, Method: method}
	if params != nil {
		m.Params = p
	}
	b.waiting[m.ID] = answer
	b.mu.Unlock()
	data, err := json.Marshal(m)
	require.NoError(b.t, err)
	_, err = b.to.Write(append(data, 0))
	require.NoError(b.t, err)
	select {
	case got := <-answer:
		require.Empty(b.t, string(got.Error), method)
		if into != nil {
			require.NoError(b.t, json.Unmarshal(got.Result, into), method)
		}
	case <-b.gone:
		b.t.Fatalf("%s: the browser is gone", method)
	case <-time.After(answerWithin):
		b.t.Fatalf("%s: no answer", method)
	}
}

// seen returns the events of the given methods so far.
func (b *browser) seen(methods ...string) (out []message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.events {
		for _, m := range methods {
			if e.Method == m {
				out = append(out, e)
			}
		}
	}
	return out
}

// show loads a page at a width and a colour scheme, and waits until it has loaded.
func (b *browser) show(url string, width int, scheme string) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.mu.Lock()
	b.events = nil
	b.mu.Unlock()
	b.call("Page.navigate", map[string]any{"url": url}, nil)
	require.Eventually(b.t, func() bool { return len(b.seen("Page.loadEventFired")) > 0 }, answerWithin, 5*time.Millisecond, "the page has loaded")
}

// eval evaluates an expression in the page.
func (b *browser) eval(expression string, into any) {
	b.t.Helper()
	var got struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &got)
	require.Empty(b.t, string(got.ExceptionDetails), expression)
	require.NoError(b.t, json.Unmarshal(got.Result.Value, into), "%s", got.Result.Value)
}

// press presses a key and lets it go.
func (b *browser) press(key string, code int) {
	for _, kind := range []string{"keyDown", "keyUp"} {
		b.call("Input.dispatchKeyEvent", map[string]any{"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}, nil)
	}
}

// spoken is the name that a screen reader is given for an element, and its role.
func (b *browser) spoken(selector string) (role, name string) {
	b.t.Helper()
	var doc struct{ Root struct{ NodeID int } }
	b.call("DOM.getDocument", nil, &doc)
	var node struct{ NodeID int }
	b.call("DOM.querySelector", map[string]any{"nodeId": doc.Root.NodeID, "selector": selector}, &node)
	require.NotZero(b.t, node.NodeID, selector)
	var tree struct {
		Nodes []struct {
			Role, Name struct{ Value any }
		}
	}
	b.call("Accessibility.getPartialAXTree", map[string]any{"nodeId": node.NodeID, "fetchRelatives": false}, &tree)
	require.NotEmpty(b.t, tree.Nodes)
	return fmt.Sprint(tree.Nodes[0].Role.Value), fmt.Sprint(tree.Nodes[0].Name.Value)
}

// picture returns a PNG of the whole page.
func (b *browser) picture() []byte {
	var shot struct{ Data []byte }
	b.call("Emulation.setScrollbarsHidden", map[string]any{"hidden": true}, nil)
	b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}, &shot)
	return shot.Data
}
