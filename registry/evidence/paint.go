package evidence

import "strings"

// Escape sequences of a terminal. They are three of the eight colours that every terminal
// has, bold, so that they are told apart from text on a light and on a dark ground.
const (
	red    = "\x1b[1;31m"
	green  = "\x1b[1;32m"
	yellow = "\x1b[1;33m"
	plain  = "\x1b[0m"
)

// Paint puts colours into the text that tierd check prints, which says the same without
// them: the verdict's word at the start of a line, the sentence that says which relation
// refused, and the rows of chunks that are missing or surplus.
func Paint(text string) string {
	var b strings.Builder
	for l := range strings.Lines(text) {
		line, end := strings.CutSuffix(l, "\n")
		word, rest, _ := strings.Cut(line, "  ")
		colour := map[string]string{"ACCEPTED": green, "REFUSED": red, "UNDECIDED": yellow}[word]
		switch {
		case colour != "":
			b.WriteString(colour + word + plain + "  " + rest)
		case strings.HasPrefix(line, "refused by relation "), marked(line, "missing"), marked(line, "surplus"):
			b.WriteString(red + line + plain)
		default:
			b.WriteString(line)
		}
		if end {
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// marked reports whether a line is the row of a drawing with the given name.
func marked(line, name string) bool {
	rest, ok := strings.CutPrefix(line, "    "+name+" ")
	return ok && strings.Contains(rest, "^")
}
