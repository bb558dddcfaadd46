//! A module that tries the SDK: the rule probe does in its scan what its parameters say, and
//! echo is a policy, so that the module has two rules.
#![no_std]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod kv;
use kv::{Answer, Bitmap, No, Round, Span, State, States};

pub const MANIFEST: &str = r#"{"rules": [
    {"name": "probe", "version": "1", "kind": "spec", "mask": "unverified", "params": [
        {"name": "op", "min": 0, "max": 9}, {"name": "class", "min": 0, "max": 15}, {"name": "lo", "min": 0, "max": 1024}, {"name": "hi", "min": 0, "max": 1024}]},
    {"name": "echo", "version": "1", "kind": "policy"}
]}"#;

pub static RULES: [&dyn kv::Rule; 2] = [&Probe, &Echo];

struct Probe;

impl kv::Rule for Probe {
    fn params(&self) -> usize {
        4
    }

    fn open(&self, _: &[u64]) -> Answer<()> {
        Ok(())
    }

    fn reach(&self, _: &[u64], _: &Round, _: &mut Bitmap) -> Answer<()> {
        kv::fail(format_args!("100%: no {}, {} or {}", "reach", u32::MAX, u64::MAX))
    }

    fn scan(&self, p: &[u64], _: &Round, s: &mut States, demand: &mut Bitmap) -> Answer<Span> {
        let (c, lo, hi) = (p[1] as u8, p[2] as i64 - 64, p[3] as i64 - 64);
        let state = [State::Miss, State::Hit, State::Pending, State::Retry][p[1] as usize & 3];
        match p[0] {
            0 => return Ok(Span::Usable(s.first(c, lo, hi))),
            1 => return Ok(Span::Usable(s.last(c, lo, hi))),
            2 => s.mark(c, lo, hi, demand),
            3 => {
                s.fill(lo, hi, state);
                s.mark(kv::HERE, 0, 1 << 20, demand);
            }
            4 => demand.set_range(lo, hi),
            5 => demand.set(lo),
            6 => return Ok(Span::Usable(s.at(lo) as i64)),
            7 => return Err(No::Resume),
            8 => demand.set_tails(lo, hi, c as i64 + 1, (lo + 64) & 31),
            _ => (),
        }
        Ok(Span::Usable(0))
    }

    fn need(&self, _: &[u64], _: &Round, _: &mut Bitmap) -> Answer<()> {
        Err(No::Resume)
    }
}

struct Echo;

impl kv::Rule for Echo {
    fn params(&self) -> usize {
        0
    }

    fn open(&self, _: &[u64]) -> Answer<()> {
        Ok(())
    }

    fn reach(&self, _: &[u64], r: &Round, out: &mut Bitmap) -> Answer<()> {
        out.set_range(0, (r.hi - r.lo) as i64);
        Ok(())
    }

    fn scan(&self, _: &[u64], r: &Round, _: &mut States, _: &mut Bitmap) -> Answer<Span> {
        Ok(Span::Usable((r.hi - r.lo) as i64))
    }
}
