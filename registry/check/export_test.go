package check

// WithTables returns the options for a run that tries all lookup tables of up to n chunks,
// and of no longer ones: most of a run over a small deployment is those of six.
func (o Options) WithTables(n int) Options {
	o.tables = n
	return o
}
