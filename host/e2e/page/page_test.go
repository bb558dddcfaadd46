// Package page_test opens the page that tierd check --html writes in a real browser, and
// asks it what a person would see, hear and reach by the keyboard.
package page_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/check"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/evidence"
	"github.com/tierd/tierd/specs"
)

// hostile names come from a file that somebody else wrote.
const hostile = `</title><script>document.title="run"</script><img src=x onerror=alert(1)>"'&`

// refused judges a window rule that forgets part of its supply.
func refused(t *testing.T, model string, blockTokens, maxTokens int) *registry.Verdict {
	text := fmt.Sprintf(`
model: %s
max_tokens: %d
align_tokens: %d
groups:
  - {name: "sliding <b>", rule: mine, params: {window: 20}, block_tokens: %d, chunk_blocks: 2, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
  - {name: full, rule: full, block_tokens: %d, chunk_blocks: 4, layers: 1, kv_heads: 1, head_dim: 4, dtype: fp8}
`, quoted(model), maxTokens, 16*blockTokens, blockTokens, blockTokens)
	d, err := deploy.Parse("d.yaml", []byte(text))
	require.NoError(t, err)
	open := func(_ context.Context, _, ref string) (registry.Opened, error) {
		if ref == "mine" {
			return registry.Opened{Spec: abitest.Forgetful(specs.Window()), Digest: "sha256:" + strings.Repeat("ab", 32), Source: "mine.wasm"}, nil
		}
		return registry.Opened{Spec: specs.Full(), Digest: "sha256:" + strings.Repeat("cd", 32), Source: "shipped"}, nil
	}
	_, err = registry.Register(context.Background(), d, open, registry.Options{Check: check.Options{Seed: 1}, Checker: "sha256:" + strings.Repeat("ef", 32)})
	var refusal *registry.Refusal
	require.ErrorAs(t, err, &refusal)
	return refusal.Verdict
}

func quoted(s string) string { b, _ := json.Marshal(s); return string(b) }

// large is a refusal with the longest grid that a deployment can have, in which one chunk
// among 8,192 is missing.
func large(t *testing.T, missing uint32) *registry.Verdict {
	v := refused(t, "large", 4, 200)
	ce := *v.Counterexample
	var tails, rest []check.Range
	for k := uint32(0); k < 8192; k += 32 {
		tails = append(tails, check.Range{First: k + 29, Last: k + 31})
		if k+29 <= missing && missing <= k+31 {
			rest = append(rest, check.Range{First: k + 29, Last: missing - 1})
			continue
		}
		rest = append(rest, check.Range{First: k + 29, Last: k + 31})
	}
	ce.Groups = []check.GroupRows{{Name: "sliding", ChunkTokens: 16, Rows: []check.RowOfRanges{
		{Name: "supply", Chunks: rest}, {Name: "demand", Chunks: tails}, {Name: "need", Chunks: tails}, {Name: "missing", Chunks: []check.Range{{First: missing, Last: missing}}},
	}}}
	v.Counterexample = &ce
	return v
}

func pages(t *testing.T) map[string][]evidence.Finding {
	accepted := *refused(t, "gpt", 4, 200)
	accepted.Verdict, accepted.Counterexample = registry.Accepted, nil
	budget := accepted
	budget.Verdict, budget.Undecided, budget.Reached = registry.Undecided, check.ErrBudget.Error(), []string{"pure: all 200 edge lengths", "states: none of 9"}
	pair := *refused(t, "pair", 4, 200)
	pair.Against = &registry.Side{File: "b.yaml", Model: "pair", Engine: "vllm-0.30", DeploymentDigest: "sha256:b", RulesDigest: "sha256:c"}
	return map[string][]evidence.Finding{
		"refused":   {{Verdict: refused(t, "gpt", 4, 200), File: "d.yaml"}},
		"hostile":   {{Verdict: refused(t, hostile, 4, 200), File: hostile}},
		"large":     {{Verdict: large(t, 5023), File: "d.yaml"}},
		"accepted":  {{Verdict: &accepted, File: "d.yaml"}},
		"undecided": {{Verdict: &budget, File: "d.yaml"}},
		"error":     {evidence.Undecided("d.yaml", errors.New("group full: rule fulll is not known"))},
		"pair":      {{Verdict: &pair, File: "a.yaml"}},
		"rules":     {{Verdict: &accepted, File: "r.wasm#a", Rule: true}, {Verdict: refused(t, "b 1.0.0", 4, 200), File: "r.wasm#b", Rule: true, Deployment: "model: tryout\n"}},
	}
}

// TestPages opens each page, wide and narrow, light and dark.
func TestPages(t *testing.T) {
	b := open(t)
	dir := t.TempDir()
	for name, findings := range pages(t) {
		data, err := evidence.HTML(&evidence.Report{Version: "v1.2.3", Command: "tierd check d.yaml --seed=1", Findings: findings})
		require.NoError(t, err)
		path := filepath.Join(dir, name+".html")
		require.NoError(t, os.WriteFile(path, data, 0o600))
		for _, scheme := range []string{"light", "dark"} {
			for _, width := range []int{1280, 400} {
				at := fmt.Sprintf("%s, %s, %d px", name, scheme, width)
				b.show((&url.URL{Scheme: "file", Path: path}).String(), width, scheme)
				b.quiet(at)
				b.legible(at)
				b.fits(at)
				b.outlined(at, findings)
				for _, f := range findings {
					if f.Counterexample != nil {
						b.missing(at, name, &f)
					}
				}
				b.quiet(at)
				if out := os.Getenv("TIERD_SCREENSHOTS"); out != "" {
					require.NoError(t, os.WriteFile(filepath.Join(out, fmt.Sprintf("%s-%s-%d.png", name, scheme, width)), b.picture(), 0o644))
				}
			}
		}
	}
}

// quiet: nothing is logged, nothing but the page is asked for, and no script of a name ran.
func (b *browser) quiet(at string) {
	b.t.Helper()
	for _, e := range b.seen("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Page.javascriptDialogOpening") {
		b.t.Errorf("%s: %s %s", at, e.Method, e.Params)
	}
	for _, e := range b.seen("Network.requestWillBeSent") {
		var r struct{ Request struct{ URL string } }
		require.NoError(b.t, json.Unmarshal(e.Params, &r))
		if !strings.HasSuffix(r.Request.URL, ".html") && r.Request.URL != "data:," {
			b.t.Errorf("%s: asks for %s", at, r.Request.URL)
		}
	}
	var page struct {
		Title         string
		Scripts, Imgs int
	}
	b.eval(`({Title: document.title, Scripts: document.scripts.length, Imgs: document.images.length})`, &page)
	require.True(b.t, strings.HasPrefix(page.Title, "tierd check: "), "%s: title %q", at, page.Title)
	require.Zero(b.t, page.Scripts, at)
	require.Zero(b.t, page.Imgs, at)
}

// contrasts computes, for each text that is seen, the contrast of WCAG 2 between its colour
// and the first ground below it that is not transparent.
const contrasts = `(() => {
  const rgb = s => { const m = s.match(/[\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1] };
  const lum = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 }); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const out = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = walk.nextNode(); n; n = walk.nextNode()) {
    const e = n.parentElement, box = e.getBoundingClientRect();
    if (!n.data.trim() || e.closest('.sr, .skip') || !box.width) continue;
    let ground = [255, 255, 255, 0];
    for (let p = e; p && ground[3] === 0; p = p.parentElement) ground = rgb(getComputedStyle(p).backgroundColor);
    const a = lum(rgb(getComputedStyle(e).color)), b = lum(ground);
    out.push({Text: n.data.trim().slice(0, 40), Ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), Opaque: ground[3] === 1, Size: parseFloat(getComputedStyle(e).fontSize)});
  }
  return out;
})()`

// legible: every text has a contrast of at least 4.5, and at least 13 pixels.
func (b *browser) legible(at string) {
	b.t.Helper()
	var texts []struct {
		Text        string
		Ratio, Size float64
		Opaque      bool
	}
	b.eval(contrasts, &texts)
	require.Greater(b.t, len(texts), 8, at)
	for _, x := range texts {
		if x.Ratio < 4.5 || !x.Opaque || x.Size < 13 {
			b.t.Errorf("%s: %q has contrast %.2f and %.0f px", at, x.Text, x.Ratio, x.Size)
		}
	}
}

// fits: the page does not scroll sideways; what is wide scrolls in a box of its own, which
// the keyboard reaches.
func (b *browser) fits(at string) {
	b.t.Helper()
	var wide []string
	b.eval(`[document.documentElement, ...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 &&
		!e.matches('.sr, [tabindex="0"]') && getComputedStyle(e).overflowX !== 'visible' || e === document.documentElement && e.scrollWidth > e.clientWidth)
		.map(e => e.tagName + '.' + e.className)`, &wide)
	require.Empty(b.t, wide, at)
}

// outlined: a language, one h1, headings that skip no level, tables with heads and
// captions, ids that are there once, and links that lead somewhere.
func (b *browser) outlined(at string, findings []evidence.Finding) {
	b.t.Helper()
	var page struct {
		Lang     string
		H1       int
		Headings []int
		Tables   []string
		Twice    []string
		Dead     []string
		Text     string
	}
	b.eval(`(() => { const all = s => [...document.querySelectorAll(s)], ids = all('[id]').map(e => e.id); return {
		Lang: document.documentElement.lang, H1: all('h1').length, Headings: all('h1,h2,h3').map(e => +e.tagName[1]),
		Tables: all('table').filter(t => !t.querySelector('th[scope]') || !(t.caption || t.parentElement.getAttribute('aria-labelledby'))).map(t => t.outerHTML.slice(0, 80)),
		Twice: ids.filter((x, i) => ids.indexOf(x) !== i), Dead: all('a[href^="#"]').filter(a => !document.getElementById(a.hash.slice(1))).map(a => a.hash),
		Text: document.body.innerText } })()`, &page)
	require.Equal(b.t, "en", page.Lang, at)
	require.Equal(b.t, 1, page.H1, at)
	for i := 1; i < len(page.Headings); i++ {
		require.LessOrEqual(b.t, page.Headings[i], page.Headings[i-1]+1, "%s: headings %v", at, page.Headings)
	}
	require.Empty(b.t, page.Tables, at)
	require.Empty(b.t, page.Twice, at)
	require.Empty(b.t, page.Dead, at)
	for _, f := range findings {
		require.Contains(b.t, page.Text, f.Model, at)
		for _, r := range f.Reached {
			require.Contains(b.t, page.Text, r, at)
		}
	}
}

// missing: the link below the table leads to the missing chunk, which is then in the window,
// not behind anything, has the focus ring, and says what it is.
func (b *browser) missing(at, page string, f *evidence.Finding) {
	b.t.Helper()
	ce := f.Counterexample
	var g *check.GroupRows
	var chunk uint32
	for i := range ce.Groups {
		for _, r := range ce.Groups[i].Rows {
			if r.Name == "missing" && len(r.Chunks) > 0 && g == nil {
				g, chunk = &ce.Groups[i], r.Chunks[0].First
			}
		}
	}
	require.NotNil(b.t, g, at)
	says := fmt.Sprintf("chunk %d, tokens %d to %d: missing", chunk, uint64(chunk)*g.ChunkTokens, uint64(chunk+1)*g.ChunkTokens-1)
	// By the keyboard alone: the first Tab shows the skip link, some later one the link of
	// the missing chunk.
	b.eval(`(scrollTo(0, 0), document.activeElement.blur(), getSelection().removeAllRanges(), 0)`, new(int))
	var focus struct {
		Text, Class, ID string
		Left            float64
	}
	const focused = `(() => { const e = document.activeElement; return {Text: e.textContent, Class: e.className, ID: e.id, Left: e.getBoundingClientRect().left} })()`
	first := ""
	for i := 0; i < 400 && focus.Text != says; i++ {
		b.press("Tab", 9)
		b.eval(focused, &focus)
		if i == 0 {
			first = focus.Class
			require.True(b.t, first != "skip" || focus.Left >= 0, "%s: the skip link is seen when it has the focus", at)
		}
		if strings.Contains(focus.Class, "missing") {
			require.Contains(b.t, focus.Text, says, at)
			break
		}
	}
	require.Equal(b.t, "skip", first, at)
	require.Contains(b.t, focus.Text, says, "%s: reached by Tab", at)
	var cell struct {
		Width, Height                      float64
		In, Top, Focused                   bool
		Letter, Row, Column, Outline, Hash string
	}
	b.eval(fmt.Sprintf(`(async () => {
		const says = %q, link = [...document.querySelectorAll('.broken a')].find(a => a.textContent === says);
		link.click();
		await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
		const e = document.getElementById(link.hash.slice(1)); e.focus();
		await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
		const r = e.getBoundingClientRect(), x = r.left + r.width / 2, y = r.top + r.height / 2, style = getComputedStyle(e);
		return {Width: r.width, Height: r.height, In: r.left >= 0 && r.top >= 0 && r.right <= innerWidth && r.bottom <= innerHeight,
			Top: e.contains(document.elementFromPoint(x, y)), Focused: document.activeElement === e,
			Letter: e.querySelector('b').textContent,
			Row: e.parentElement.cells[0].textContent, Column: e.closest('table').tHead.rows[0].cells[e.cellIndex].textContent,
			Outline: style.outlineStyle + ' ' + style.outlineWidth, Hash: link.hash} })()`, says), &cell)
	require.GreaterOrEqual(b.t, cell.Width, 24.0, at)
	require.GreaterOrEqual(b.t, cell.Height, 24.0, at)
	require.True(b.t, cell.In, "%s: the missing chunk is in the window", at)
	require.True(b.t, cell.Top, "%s: nothing lies over the missing chunk", at)
	require.True(b.t, cell.Focused, "%s: the missing chunk takes the focus", at)
	require.Equal(b.t, "M", cell.Letter, at)
	require.Equal(b.t, "missing", cell.Row, at)
	require.Equal(b.t, fmt.Sprint(chunk), cell.Column, at)
	require.Equal(b.t, "solid 3px", cell.Outline, at)
	role, name := b.spoken(cell.Hash)
	require.Contains(b.t, strings.ToLower(role), "cell", at)
	require.Equal(b.t, says, name, at)
}
