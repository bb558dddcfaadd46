package rules

import (
	"context"
	"fmt"
	"time"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
	"github.com/tierd/tierd/registry/stock"
)

// JudgeStock judges a deployment of a stock engine: against another one that it meets in a
// rolling upgrade, both ways, or, where that is nil, against itself. Refused and undecided
// are verdicts; an error means that there is none. Nothing is opened and nothing is kept: a
// check takes seconds, and no daemon waits for it.
func JudgeStock(ctx context.Context, d, against *deploy.Deployment, o Options, at *stock.At) (*registry.Verdict, error) {
	by, err := checker()
	if err != nil {
		return nil, err
	}
	so := stock.Options{Check: o.Check, Checker: by, Now: time.Now, At: at}
	if against != nil {
		return stock.Against(ctx, d, against, so)
	}
	return stock.Judge(ctx, d, so)
}

// served reports a deployment whose rules no daemon serves.
func served(d *deploy.Deployment) error {
	if !d.IsStock() {
		return nil
	}
	return fmt.Errorf("%s: engine is %s, whose own rules run inside the engine: tierd check judges them, and no daemon serves them. Write engine: %s, with align_tokens and policies, for what tierd is to serve", d.File(), d.Engine, deploy.EngineTierd)
}
