package faults

const intro = `# Real faults

What make test-faults saw on %s, load average %s.

`

const legend = ""
