// A rule for sliding-window attention: the token at q reads the keys k with q-k < window.
import { module, check, Rule, Params, Round, Bitmap, States, Span, Answer, ABSENT, HERE, UNKNOWN } from "./kv";
export { kv_abi_1, kv_manifest, kv_open, kv_reach, kv_scan, kv_need } from "./kv";

/** Returns a - b, or 0. */
function less(a: u64, b: u64): u64 { return a - min(a, b); }

class Window extends Rule {
  params(): u32 { return 1; }

  open(p: Params): Answer { return check("window", p[0], 2, 1 << 20, "tokens"); }

  /** Stores the tail of every point at which somebody may go on: its complete chunks. */
  reach(p: Params, r: Round, out: Bitmap): Answer {
    const behind = p[0] - 1; // how many tokens before it the query at n reads
    const chunk = r.chunk_tokens, lo: i64 = r.lo, complete = <i64>(r.stored_tokens / chunk);

    let n = r.resume_tokens;
    for (let i = 0; i < 2; i++) {
      out.setRange(<i64>(less(n, behind) / chunk) - lo, min<i64>((n + chunk - 1) / chunk, complete) - lo);
      n = r.junction_tokens <= r.stored_tokens ? r.junction_tokens : 0;
    }

    // Aligned points lie at the ends of chunks, so their tails have one size, in chunks.
    const step = <i64>(r.align_tokens / chunk);
    if (step > 0) {
      out.setTails(step - lo, complete - lo, step, (behind + chunk - 1) / chunk);
    }
    return Answer.OK;
  }

  /** Tries one end after the other from the right: the first whose tail is here. */
  scan(p: Params, r: Round, states: States, demand: Bitmap, span: Span): Answer {
    for (let end = <i64>(r.hi - r.lo); end > 0; ) {
      const n = min(r.bound_tokens, (r.lo + <u64>end) * r.chunk_tokens);
      const lo = <i64>less(less(n, p[0] - 1) / r.chunk_tokens, r.lo);
      const hi = <i64>less((n + r.chunk_tokens - 1) / r.chunk_tokens, r.lo);
      const miss = states.last(ABSENT, lo, hi);
      if (miss >= lo) {
        // No end whose last chunk is a miss will do: go on left of them.
        end = states.last(HERE | UNKNOWN, 0, miss) + 1;
      } else if (states.first(UNKNOWN, lo, hi) < hi) {
        states.mark(UNKNOWN, lo, hi, demand); // ask for these, then scan again
        span.deferred = true;
        return Answer.OK;
      } else {
        demand.setRange(lo, hi);
        span.usable = end;
        return Answer.OK;
      }
    }
    return Answer.OK;
  }

  /**
   * The truth that the other two are judged by, so it shares no code with them: the query
   * at n reads the keys n-window+1 to n-1.
   */
  need(p: Params, r: Round, out: Bitmap): Answer {
    const n = r.resume_tokens, oldest = n < p[0] ? 0 : n - p[0] + 1;
    if (n > 0) {
      out.setRange(oldest / r.chunk_tokens, (n - 1) / r.chunk_tokens + 1);
    }
    return Answer.OK;
  }
}

module(
  `{"rules": [{
    "name": "my-window", "version": "1.0.0", "kind": "spec", "mask": "window", "mask_args": ["window"],
    "params": [{"name": "window", "min": 2, "max": 1048576, "required": true, "unit": "tokens"}]
  }]}`,
  [new Window()]);
