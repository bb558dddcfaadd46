//! A rule for sliding-window attention: the token at q reads the keys k with q-k < window.
#![no_std]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod kv;
use kv::{Answer, Bitmap, Round, Span, States};

pub const MANIFEST: &str = r#"{"rules": [{
    "name": "my-window", "version": "1.0.0", "kind": "spec", "mask": "window", "mask_args": ["window"],
    "params": [{"name": "window", "min": 2, "max": 1048576, "required": true, "unit": "tokens"}]
}]}"#;

pub static RULES: [&dyn kv::Rule; 1] = [&Window];

struct Window;

impl kv::Rule for Window {
    fn params(&self) -> usize {
        1
    }

    fn open(&self, p: &[u64]) -> Answer<()> {
        kv::check("window", p[0], 2, 1 << 20, "tokens")
    }

    /// Stores the tail of every point at which somebody may go on: its complete chunks.
    fn reach(&self, p: &[u64], r: &Round, out: &mut Bitmap) -> Answer<()> {
        let behind = p[0] - 1; // how many tokens before it the query at n reads
        let (chunk, lo) = (r.chunk_tokens, r.lo as i64);
        let complete = (r.stored_tokens / chunk) as i64;

        let junction = if r.junction_tokens <= r.stored_tokens { r.junction_tokens } else { 0 };
        for n in [r.resume_tokens, junction] {
            let (first, end) = (n.saturating_sub(behind) / chunk, (n + chunk - 1) / chunk);
            out.set_range(first as i64 - lo, complete.min(end as i64) - lo);
        }

        // Aligned points lie at the ends of chunks, so their tails have one size, in chunks.
        let step = (r.align_tokens / chunk) as i64;
        if step > 0 {
            out.set_tails(step - lo, complete - lo, step, ((behind + chunk - 1) / chunk) as i64);
        }
        Ok(())
    }

    /// Tries one end after the other from the right: the first whose tail is here.
    fn scan(&self, p: &[u64], r: &Round, states: &mut States, demand: &mut Bitmap) -> Answer<Span> {
        let base = r.lo as u64;
        let mut end = (r.hi - r.lo) as i64;
        while end > 0 {
            let n = r.bound_tokens.min((base + end as u64) * r.chunk_tokens);
            let lo = (n.saturating_sub(p[0] - 1) / r.chunk_tokens).saturating_sub(base) as i64;
            let hi = ((n + r.chunk_tokens - 1) / r.chunk_tokens).saturating_sub(base) as i64;
            let miss = states.last(kv::ABSENT, lo, hi);
            if miss >= lo {
                // No end whose last chunk is a miss will do: go on left of them.
                end = states.last(kv::HERE | kv::UNKNOWN, 0, miss) + 1;
            } else if states.first(kv::UNKNOWN, lo, hi) < hi {
                states.mark(kv::UNKNOWN, lo, hi, demand); // ask for these, then scan again
                return Ok(Span::Deferred);
            } else {
                demand.set_range(lo, hi);
                return Ok(Span::Usable(end));
            }
        }
        Ok(Span::Usable(0))
    }

    /// The truth that the other two are judged by, so it shares no code with them: the
    /// query at n reads the keys n-window+1 to n-1.
    fn need(&self, p: &[u64], r: &Round, out: &mut Bitmap) -> Answer<()> {
        let n = r.resume_tokens;
        let oldest = (n + 1).saturating_sub(p[0]);
        if n > 0 {
            out.set_range((oldest / r.chunk_tokens) as i64, ((n - 1) / r.chunk_tokens + 1) as i64);
        }
        Ok(())
    }
}
