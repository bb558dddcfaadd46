package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Text draws a status for people. With colour it has SGR codes, for a terminal. What came
// from peers cannot write to that terminal: it is cleaned.
func Text(s *Status, colour bool) string {
	d := &drawing{colour: colour}
	d.head(s)
	d.attention(s)
	d.peers(s, served(s))
	d.groups(s)
	d.waits(s)
	d.pins(s)
	d.rules(s)
	return d.b.String()
}

type drawing struct {
	b      strings.Builder
	colour bool
}

// A tint is an SGR code, "" = none.
type tint string

const (
	plain  tint = ""
	bold   tint = "1"
	good   tint = "32"
	warned tint = "33"
	bad    tint = "31"
)

func (d *drawing) paint(t tint, s string) string {
	if !d.colour || t == plain || s == "" {
		return s
	}
	return "\x1b[" + string(t) + "m" + s + "\x1b[0m"
}

func (d *drawing) linef(format string, args ...any) { fmt.Fprintf(&d.b, format+"\n", args...) }

// columnsMax is the width that lines are broken at: two terminals stand beside each other on
// a common screen, and a line of a pasted report stays one.
const columnsMax = 120

// fold draws text in lines of at most columnsMax, where its blanks allow, behind lead and then
// hang.
func (d *drawing) fold(t tint, lead, hang, text string) {
	most := columnsMax - max(len(lead), len(hang))
	text = strings.TrimRight(text, " ")
	for cut := lineEnd(text, most); cut < len(text); cut = lineEnd(text, most) {
		d.linef("%s%s", lead, d.paint(t, text[:cut]))
		lead, text = hang, strings.TrimLeft(text[cut:], " ")
	}
	d.linef("%s%s", lead, d.paint(t, text))
}

// lineEnd returns how many bytes of a text go on a line of most columns: up to its last blank
// that fits, or else its first one. It looks no further than the line is long, for a reason
// may be long, too.
func lineEnd(text string, most int) int {
	var m meter
	cut := -1
	for i, r := range text {
		if r == ' ' && i > 0 && (cut < 0 || m.columns <= most) {
			cut = i
		}
		if m.add(r); m.columns > most && cut >= 0 {
			return cut
		}
	}
	return len(text)
}

// entry draws what the head says of one thing.
func (d *drawing) entry(t tint, name, format string, args ...any) {
	const column = 12
	d.fold(t, fmt.Sprintf("  %-*s", column, name), strings.Repeat(" ", 2+column), fmt.Sprintf(format, args...))
}

// width is how many columns a text takes, SGR codes apart.
func width(s string) int {
	var m meter
	for _, r := range s {
		m.add(r)
	}
	return m.columns
}

// A meter counts the columns of a text, rune by rune.
type meter struct {
	columns int
	code    bool // in an SGR code
}

func (m *meter) add(r rune) {
	switch {
	case r == '\x1b':
		m.code = true
	case m.code:
		m.code = r != 'm'
	default:
		m.columns++
	}
}

func (d *drawing) head(s *Status) {
	state := good
	switch {
	case !s.Ready && (s.State == Draining || s.State == Stopping):
		state = bad
	case !s.Ready:
		state = warned
	}
	d.linef("%s  %s for %s", d.paint(bold, "node "+clean(s.NodeID)), d.paint(state, s.State), ago(s.UpSeconds))
	if s.NotReady != "" {
		d.entry(warned, "not ready", "%s", clean(s.NotReady))
	}
	d.entry(plain, "process", "%d, boot %s, tierd %s", s.PID, s.BootID, s.Build.String())
	d.entry(plain, "deployment", "%s from %s, %s", clean(s.Deployment.Model), clean(s.Deployment.File), short(s.Deployment.Digest))
	if v := s.Verdict; v == nil {
		d.entry(plain, "verdict", "none yet")
	} else {
		from := map[string]string{FromCheck: "checked at this start", FromKept: "kept from an earlier check", FromCertificate: "by the certificate of key " + short(v.CertificateKey)}[v.From]
		d.entry(plain, "verdict", "%s, %s: %d cases; rules %s", v.Verdict, cmp.Or(from, v.From), v.Cases, short(v.RulesDigest))
	}
	d.entry(plain, "listens", "engines %s, peers %s, data %s, http %s", clean(s.Addresses.EngineSocket), s.Addresses.Peer, s.Addresses.Data, s.Addresses.HTTP)
	d.entry(plain, "engines", "%d attached, %d requests", s.Engines, s.Requests)
	d.device(&s.Device)
	c := &s.Slots
	d.entry(plain, "slots", "%d of %s, %s resident", c.Total, size(uint64(c.SlotBytes)), size(uint64(c.ResidentBytes)))
	d.entry(plain, "", "%d free, %d writing, %d readable (%d evictable), %d detached, %d fenced", c.Free, c.Writing, c.Readable, c.Evictable, c.Detached, c.Fenced)
	d.entry(plain, "parked", "%d chunks, %s of at most %s, in %d transfers", s.Parked.Chunks, size(s.Parked.Bytes), size(s.Parked.BytesMax), s.Parked.Transfers)
}

// device says where engines keep their blocks, in one line without a GPU and in three with.
func (d *drawing) device(v *Device) {
	d.entry(plain, "device", "%s (%s)", clean(v.Name), clean(v.Why))
	g := v.GPU
	if g == nil {
		return
	}
	state := fmt.Sprintf("%s of %s used", size(uint64(g.MemoryUsedBytes)), size(uint64(g.MemoryTotalBytes)))
	if g.Lost != "" {
		state = d.paint(bad, "lost")
	}
	d.entry(plain, "gpu", "%s, %s, %s, %s", clean(g.Name), clean(g.UUID), clean(g.PCIBusID), state)
	link := fmt.Sprintf("PCIe %d of %d x%d of x%d", g.PCIeGeneration, g.PCIeGenerationMax, g.PCIeLanes, g.PCIeLanesMax)
	if g.Idle {
		link += " (idle)"
	}
	if g.NoHealth != "" {
		link = "health unknown: " + clean(g.NoHealth)
	}
	d.entry(plain, "link", "%s; %s of %s pinned", link, size(uint64(v.PinnedBytes)), size(uint64(v.PinnedOf)))
}

func (d *drawing) attention(s *Status) {
	if len(s.Attention) == 0 {
		return
	}
	d.linef("\n%s", d.paint(bold, "attention"))
	for _, a := range s.Attention {
		d.fold(warned, "  ", "    ", clean(a))
	}
}

// served says of a leg whether the deployment has it; the others are no news of a peer.
func served(s *Status) func(Leg) bool {
	return func(l Leg) bool { return len(s.Deployment.Legs) == 0 || slices.Contains(s.Deployment.Legs, l.Leg) }
}

func (d *drawing) peers(s *Status, served func(Leg) bool) {
	if len(s.Peers) == 0 {
		d.linef("\n%s  none", d.paint(bold, "peers"))
		return
	}
	t := table{{plainCell("peer"), plainCell("state"), plainCell("boot"), plainCell("rtt"), plainCell("silence"), plainCell("sessions"),
		plainCell("lookups"), plainCell("demands"), plainCell("serves"), plainCell("pinned"), plainCell("lanes"), plainCell("pair"), plainCell("legs")}}
	var why []string
	for i := range s.Peers {
		p := &s.Peers[i]
		var legs []string
		told := map[string]bool{}
		for _, l := range p.Legs {
			if l.Allowed {
				legs = append(legs, l.Leg)
			} else if served(l) && !told[l.Why] {
				told[l.Why] = true
				why = append(why, fmt.Sprintf("not %s with %s: %s", refusedFor(p.Legs, l.Why, served), clean(p.ID), clean(l.Why)))
			}
		}
		state := cell{p.State, map[string]tint{"ready": good, "suspect": bad, "dead": bad}[p.State]}
		switch {
		case p.Draining && p.State == "ready":
			state = cell{"draining", warned}
		case p.Draining:
			state.text += ", draining"
		}
		t = append(t, []cell{plainCell(clean(p.ID)), state, plainCell(cmp.Or(shortBoot(p.BootID), "-")), plainCell(span(p.RTTSeconds)), plainCell(span(p.SilenceSeconds)),
			number(p.Sessions), number(p.Lookups), number(p.Demands), number(p.Serves), plainCell(size(p.PinnedBytes)), number(p.DataLanes), pairCell(p.Pair.State), plainCell(cmp.Or(strings.Join(legs, ","), "-"))})
	}
	d.table("peers", t)
	for _, line := range why {
		d.fold(warned, "  ", "    ", line)
	}
}

// pairCell is the state of a pair of versions.
func pairCell(state string) cell {
	if state == "" || state == "none" {
		return plainCell("-")
	}
	return cell{clean(state), map[string]tint{"accepted": good, "checking": warned, "refused": bad, "undecided": warned}[state]}
}

// refusedFor lists the legs that have one reason.
func refusedFor(legs []Leg, why string, served func(Leg) bool) string {
	var all []string
	for _, l := range legs {
		if served(l) && !l.Allowed && l.Why == why {
			all = append(all, l.Leg)
		}
	}
	return strings.Join(all, ", ")
}

func (d *drawing) groups(s *Status) {
	t := table{{plainCell("group"), plainCell("leg"), plainCell("demanded"), plainCell("supplied"), plainCell("transferred"), plainCell("unmatched"), plainCell("peers demanded"), plainCell("sent"), plainCell("not sent")}}
	for _, g := range s.Groups {
		ended := maps.Clone(g.PeerEnded)
		sent := ended[sentWell]
		delete(ended, sentWell)
		if g.Demanded+g.Supplied+g.PeerDemanded == 0 {
			continue
		}
		t = append(t, []cell{plainCell(clean(g.Group)), plainCell(g.Leg), number(g.Demanded), number(g.Supplied), number(g.Transferred), causes(g.Unmatched),
			number(g.PeerDemanded), number(sent), causes(ended)})
	}
	if len(t) == 1 {
		d.linef("\n%s  none yet", d.paint(bold, "chunks"))
		return
	}
	d.table("chunks since the start", t)
}

// sentWell is the end of a peer's chunk that is no cause.
const sentWell = "transferred"

// causes lists the counts that are not 0, the largest first.
func causes(counts map[string]uint64) cell {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) })
	var parts []string
	for _, n := range names {
		if counts[n] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", counts[n], n))
		}
	}
	if len(parts) == 0 {
		return plainCell("0")
	}
	return cell{strings.Join(parts, ", "), warned}
}

func (d *drawing) waits(s *Status) {
	t := table{{plainCell("wait"), plainCell("in work"), plainCell("oldest"), plainCell("ok"), plainCell("ended otherwise")}}
	for _, w := range s.Waits {
		ended := maps.Clone(w.Ended)
		ok := ended["ok"]
		delete(ended, "ok")
		t = append(t, []cell{plainCell(w.Wait), number(w.InWork), plainCell(span(w.OldestSeconds)), number(ok), causes(ended)})
	}
	d.table("waits", t)
}

func (d *drawing) pins(s *Status) {
	t := table{{plainCell("owner"), plainCell("kind"), plainCell("pins"), plainCell("bytes"), plainCell("oldest"), plainCell("by")}}
	for _, p := range s.Pins {
		if p.Count > 0 {
			t = append(t, []cell{plainCell(p.Owner), plainCell(p.Kind), number(p.Count), plainCell(size(uint64(p.Bytes))), plainCell(span(p.OldestSeconds)), plainCell(clean(p.OldestOwner))})
		}
	}
	if len(t) == 1 {
		d.linef("\n%s  none", d.paint(bold, "pins"))
		return
	}
	d.table("pins", t)
}

func (d *drawing) rules(s *Status) {
	if s.Verdict == nil {
		return
	}
	t := table{{plainCell("for"), plainCell("rule"), plainCell("version"), plainCell("source"), plainCell("digest")}}
	for _, r := range s.Verdict.Rules {
		t = append(t, []cell{plainCell(clean(r.For)), plainCell(clean(r.Name)), plainCell(clean(r.Version)), plainCell(clean(r.Source)), plainCell(short(r.Digest))})
	}
	d.table("rules", t)
}

// A cell has its colour beside its text, so that widths do not count it.
type cell struct {
	text string
	tint tint
}

type table [][]cell

func plainCell(s string) cell { return cell{text: s} }

func number[N int | uint64](n N) cell { return cell{text: fmt.Sprint(n)} }

// table draws rows below a title, the first one as their heads. What does not fit beside each
// other is drawn in parts, each with the first column.
func (d *drawing) table(title string, t table) {
	d.linef("\n%s", d.paint(bold, title))
	widths := make([]int, len(t[0]))
	for _, row := range t {
		for i, c := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
		}
	}
	const margin = 2 // left of each column
	for from := 1; from < len(widths); {
		all, to := margin+widths[0], from
		for ; to < len(widths) && (to == from || all+margin+widths[to] <= columnsMax); to++ {
			all += margin + widths[to]
		}
		d.columns(t, widths, from, to)
		from = to
	}
}

// columns draws the first column of a table and those of a range.
func (d *drawing) columns(t table, widths []int, from, to int) {
	for k, row := range t {
		line, blanks := "", "  "
		for i, c := range row {
			if i > 0 && (i < from || i >= to) {
				continue
			}
			style := c.tint
			if k == 0 {
				style = bold
			}
			line += blanks + d.paint(style, c.text)
			blanks = strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+2)
		}
		d.linef("%s", strings.TrimRight(line, " "))
	}
}

// short cuts a digest to what tells two apart at a glance.
func short(digest string) string {
	const hexDigits = 12
	if h, ok := strings.CutPrefix(digest, "sha256:"); ok && len(h) > hexDigits {
		return "sha256:" + clean(h[:hexDigits])
	}
	return cmp.Or(clean(digest), "-")
}

// shortBoot is the beginning of a boot id, which logs have whole.
func shortBoot(id string) string {
	const most = len("0x") + 8
	return id[:min(len(id), most)]
}

// span is a short time, with three digits.
func span(seconds float64) string {
	switch {
	case seconds <= 0:
		return "-"
	case seconds < 0.0995:
		return fmt.Sprintf("%.3g ms", seconds*1e3)
	case seconds < 99.95:
		return fmt.Sprintf("%.1f s", seconds)
	}
	return ago(seconds)
}

// ago is a long time.
func ago(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Truncate(time.Second).String()
}

// size is bytes in binary units, with three digits.
func size(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for ; v >= 1024 && i < len(units)-1; i++ {
		v /= 1024
	}
	if v == float64(int64(v)) {
		return fmt.Sprintf("%d %s", int64(v), units[i])
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}

// clean replaces what would move a terminal's cursor, or pretend to be another line.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == ' ' || unicode.IsGraphic(r) && !unicode.In(r, unicode.Zl, unicode.Zp) {
			return r
		}
		return '?'
	}, s)
}
