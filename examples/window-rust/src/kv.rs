//! All that a tierd rule in Rust needs, for ABI version 1. No std, no crate, no allocator.
//! The crate root declares this file as a module, and gives it two items:
//!
//! ```ignore
//! #![no_std]
//! #![deny(unsafe_code)]
//! #[allow(unsafe_code)]
//! mod kv;
//!
//! pub const MANIFEST: &str = r#"{"rules": [{"name": "my-rule", "version": "1.0.0", "kind": "spec", ...}]}"#;
//! pub static RULES: [&dyn kv::Rule; 1] = [&MyRule];
//! ```
//!
//! A module of several rules lists them in the order of the manifest. It is built by
//!
//! ```text
//! rustc --edition 2021 --target wasm32-unknown-unknown --crate-type cdylib -C opt-level=3 -C panic=abort \
//!     -C link-arg=--stack-first -C link-arg=--strip-all -o rule.wasm src/lib.rs
//! ```
//!
//! where --stack-first makes a stack that overflows trap instead of overwriting data.
//!
//! A rule is a pure function of its parameters and the round: keep no state. Chunk indexes
//! count from the round's lo; in need they count from 0. Ranges are clipped to the chunks
//! asked for, so no answer can be too long; a single index outside of them panics, which
//! is a trap.
#![allow(dead_code)] // a rule need not use all of it

use crate::{MANIFEST, RULES};
use core::{cell::UnsafeCell, fmt, mem::size_of};

/// Chunks of one round.
pub const CHUNKS_MAX: usize = 1 << 20;
/// Parameters of one rule.
pub const PARAMS_MAX: usize = 8;
/// Rules opened in one instance; then the host takes a fresh one.
pub const HANDLES_MAX: usize = 4096;
/// The host keeps no more of a reason.
pub const REASON_BYTES_MAX: usize = 512;
/// The Round record of version 1; those of later minors are longer.
const ROUND_BYTES: usize = 104;
const RECORD_BYTES_MAX: usize = 4096;

/// One request seen by one rule, in tokens, and the chunks asked for: lo <= chunk < hi.
/// What this side cannot know is 0. The record lies in memory as the struct does.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Round {
    pub block_tokens: u64,
    pub chunk_tokens: u64,
    pub prompt_tokens: u64,
    pub stored_tokens: u64,
    pub resume_tokens: u64,
    pub align_tokens: u64,
    pub junction_tokens: u64,
    pub resident_tokens: u64,
    pub offers: u64,
    pub local_tokens: u64,
    pub bound_tokens: u64,
    pub lo: u32,
    pub hi: u32,
}
const _: [(); ROUND_BYTES - 8] = [(); size_of::<Round>()];

/// Why a function has no answer: it failed, which only `fail` can say; or, in need,
/// nothing stored lets attention go on from the token.
pub enum No {
    Failed(Reason),
    Resume,
}
pub struct Reason(());
pub type Answer<T> = Result<T, No>;

/// What a scan answers: the usable chunks from lo on; or that it is deferred, and demand
/// marks the chunks whose state must become known first.
pub enum Span {
    Usable(i64),
    Deferred,
}

/// A rule; `p` holds its parameters. A policy leaves need as it is.
pub trait Rule: Sync {
    /// How many parameters it takes.
    fn params(&self) -> usize;
    fn open(&self, p: &[u64]) -> Answer<()>;
    fn reach(&self, p: &[u64], r: &Round, out: &mut Bitmap) -> Answer<()>;
    fn scan(&self, p: &[u64], r: &Round, states: &mut States, demand: &mut Bitmap) -> Answer<Span>;
    fn need(&self, _p: &[u64], _r: &Round, _out: &mut Bitmap) -> Answer<()> {
        fail(format_args!("kv_need: the rule gives no need, which only a policy may leave out"))
    }
}

/// Fails with a reason that the host shows: `return fail(format_args!("..."))`.
pub fn fail<T>(reason: fmt::Arguments) -> Answer<T> {
    struct Text(usize);
    impl fmt::Write for Text {
        fn write_str(&mut self, s: &str) -> fmt::Result {
            let n = s.len().min(REASON_BYTES_MAX - self.0);
            REASON.get()[self.0..self.0 + n].copy_from_slice(&s.as_bytes()[..n]);
            self.0 += n;
            Ok(())
        }
    }
    let mut text = Text(0);
    let _ = fmt::write(&mut text, reason); // write_str never fails
    *REASON_BYTES.get() = text.0;
    Err(No::Failed(Reason(())))
}

/// Fails, in the words of every rule, unless min <= value <= max, as in the manifest.
pub fn check(name: &str, value: u64, min: u64, max: u64, unit: &str) -> Answer<()> {
    if value >= min && value <= max {
        return Ok(());
    }
    let space = if unit.is_empty() { "" } else { " " };
    fail(format_args!("parameter {} is {}; it must be {} to {}{}{}", name, value, min, max, space, unit))
}

/// A set of chunks, 64 a word, empty when a rule gets it.
pub struct Bitmap<'a> {
    words: &'a mut [u64],
    bits: i64,
}

impl Bitmap<'_> {
    pub fn set(&mut self, i: i64) {
        assert!(i >= 0 && i < self.bits);
        self.words[i as usize >> 6] |= 1 << (i & 63);
    }

    /// Sets the bits lo <= i < hi.
    pub fn set_range(&mut self, lo: i64, hi: i64) {
        let (mut lo, hi) = (lo.max(0), hi.min(self.bits));
        while lo < hi {
            let (end, mut m) = ((lo | 63) + 1, !0 << (lo & 63));
            if end > hi {
                m &= !0 >> (end - hi);
            }
            self.words[lo as usize >> 6] |= m;
            lo = end;
        }
    }

    /// Sets the size bits before each of first, first+step and so on, up to last. Only the
    /// points whose tails reach into the set are visited. Step must be positive.
    pub fn set_tails(&mut self, first: i64, last: i64, step: i64, size: i64) {
        assert!(step > 0);
        let mut at = if first > 0 { first } else { first + (step - first) / step * step };
        let last = last.min(self.bits + size - 1);
        if at <= last && size >= step {
            self.set_range(at - size, at + (last - at) / step * step); // they touch
            return;
        }
        while at <= last {
            self.set_range(at - size, at);
            at += step;
        }
    }
}

/// What a lookup answers for a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    Miss = 0,
    Hit = 1,
    Pending = 2,
    Retry = 3,
}

/// A set of states, for the searches: the bit 1 << state of each.
pub type Class = u8;
pub const ABSENT: Class = 1 << State::Miss as u8;
pub const UNKNOWN: Class = 1 << State::Retry as u8;
pub const HERE: Class = 1 << State::Hit as u8 | 1 << State::Pending as u8;

/// What a lookup answered for each chunk, 32 a word.
pub struct States<'a> {
    words: &'a mut [u64],
    count: i64,
}

const EVEN: u64 = 0x5555_5555_5555_5555; // the low bit of each of 32 entries

/// Returns a word with the low bit set of each entry of w that is in c.
#[inline(always)]
fn matching(c: Class, w: u64) -> u64 {
    let (lo, hi) = (w, w >> 1);
    let pick = |state: State, m: u64| if c >> state as u8 & 1 != 0 { m } else { 0 };
    EVEN & (pick(State::Miss, !(lo | hi)) | pick(State::Hit, lo & !hi) | pick(State::Pending, hi & !lo) | pick(State::Retry, lo & hi))
}

impl States<'_> {
    pub fn at(&self, i: i64) -> State {
        assert!(i >= 0 && i < self.count);
        [State::Miss, State::Hit, State::Pending, State::Retry][(self.words[i as usize >> 5] >> ((i & 31) * 2) & 3) as usize]
    }

    /// Returns the lowest i in lo..hi whose state is in c, or hi.
    #[inline]
    pub fn first(&self, c: Class, lo: i64, hi: i64) -> i64 {
        let (mut i, end) = (lo.max(0), hi.min(self.count));
        while i < end {
            let m = matching(c, self.words[i as usize >> 5]) >> ((i & 31) * 2);
            if m != 0 {
                i += m.trailing_zeros() as i64 / 2;
                return if i < end { i } else { hi };
            }
            i = (i | 31) + 1;
        }
        hi
    }

    /// Returns the highest i in lo..hi whose state is in c, or lo-1.
    #[inline]
    pub fn last(&self, c: Class, lo: i64, hi: i64) -> i64 {
        let (mut i, begin) = (hi.min(self.count) - 1, lo.max(0));
        while i >= begin {
            let m = matching(c, self.words[i as usize >> 5]) << (62 - (i & 31) * 2);
            if m != 0 {
                i -= m.leading_zeros() as i64 / 2;
                return if i >= begin { i } else { lo - 1 };
            }
            i = (i & !31) - 1;
        }
        lo - 1
    }

    /// Sets in out the bits of the entries lo..hi whose state is in c.
    pub fn mark(&self, c: Class, lo: i64, hi: i64, out: &mut Bitmap) {
        let hi = hi.min(out.bits);
        let mut i = self.first(c, lo, hi);
        while i < hi {
            out.set(i);
            i = self.first(c, i + 1, hi);
        }
    }

    /// Sets the entries lo..hi. The table is the rule's own during this call.
    pub fn fill(&mut self, lo: i64, hi: i64, state: State) {
        let (mut lo, hi) = (lo.max(0), hi.min(self.count));
        while lo < hi {
            let (end, mut m) = ((lo | 31) + 1, !0u64 << ((lo & 31) * 2));
            if end > hi {
                m &= !0 >> ((end - hi) * 2);
            }
            let w = &mut self.words[lo as usize >> 5];
            *w = *w & !m | EVEN * state as u64 & m;
            lo = end;
        }
    }
}

// From here on: the exports, and what is behind them.

#[link(wasm_import_module = "kv")]
extern "C" {
    #[link_name = "input"]
    fn host_input(to: *mut u64, room: u32) -> u32;
    #[link_name = "fail"]
    fn host_fail(reason: *const u8, bytes: u32);
}

const IN_WORDS: usize = (RECORD_BYTES_MAX + CHUNKS_MAX / 4) / 8;
const OUT_WORDS: usize = 1 + CHUNKS_MAX / 64;

/// Memory that every call uses again. An instance has one thread, and no function of this
/// file holds what another one, called meanwhile, takes.
struct Static<T>(UnsafeCell<T>);
unsafe impl<T> Sync for Static<T> {}
impl<T> Static<T> {
    #[allow(clippy::mut_from_ref)]
    fn get(&self) -> &mut T {
        unsafe { &mut *self.0.get() }
    }
}

type Opened = (u32, [u64; PARAMS_MAX]); // index in RULES, parameters
static INPUT: Static<[u64; IN_WORDS]> = Static(UnsafeCell::new([0; IN_WORDS]));
static OUTPUT: Static<[u64; OUT_WORDS]> = Static(UnsafeCell::new([0; OUT_WORDS]));
static HANDLES: Static<[Opened; HANDLES_MAX]> = Static(UnsafeCell::new([(0, [0; PARAMS_MAX]); HANDLES_MAX]));
static OPENED: Static<usize> = Static(UnsafeCell::new(0));
static REASON: Static<[u8; REASON_BYTES_MAX]> = Static(UnsafeCell::new([0; REASON_BYTES_MAX]));
static REASON_BYTES: Static<usize> = Static(UnsafeCell::new(0));

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    core::arch::wasm32::unreachable()
}

fn view<T>(p: *const T, bytes: usize) -> i64 {
    ((p as u64) << 32 | bytes as u64) as i64
}

/// What an export returns: a view of the output, or why there is none.
fn answer(a: Answer<usize>) -> i64 {
    match a {
        Ok(bytes) => view(OUTPUT.get().as_ptr(), bytes),
        Err(No::Resume) => -2,
        Err(No::Failed(_)) => {
            unsafe { host_fail(REASON.get().as_ptr(), *REASON_BYTES.get() as u32) };
            -1
        }
    }
}

/// Copies this call's input and returns its bytes.
fn pull() -> Answer<usize> {
    let n = unsafe { host_input(INPUT.get().as_mut_ptr(), 8 * IN_WORDS as u32) as usize };
    if n > 8 * IN_WORDS {
        return fail(format_args!("input of {} bytes; at most {} are read", n, 8 * IN_WORDS));
    }
    Ok(n)
}

/// An empty set in the output, after skip words.
fn empty(skip: usize, bits: usize) -> Bitmap<'static> {
    let words = &mut OUTPUT.get()[skip..skip + (bits + 63) / 64];
    words.fill(0);
    Bitmap { words, bits: bits as i64 }
}

struct Call {
    rule: &'static dyn Rule,
    params: &'static [u64],
    round: Round,
    size: usize, // of the record
    rest: usize, // the bytes that follow it
}

/// Pulls a call's input and checks its handle and its record.
fn begin(handle: i32) -> Answer<Call> {
    let n = pull()?;
    if handle as u32 as usize >= *OPENED.get() {
        return fail(format_args!("handle {} is not open; this instance opened {}", handle as u32, *OPENED.get()));
    }
    let size = if n < 8 { 0 } else { INPUT.get()[0] as u32 as usize };
    if size < ROUND_BYTES || size > RECORD_BYTES_MAX || size > n {
        return fail(format_args!("round record: size {} in {} bytes; version 1 reads {} to {}", size, n, ROUND_BYTES, RECORD_BYTES_MAX));
    }
    let round = unsafe { *(INPUT.get()[1..].as_ptr() as *const Round) };
    if round.hi < round.lo || round.hi as usize > CHUNKS_MAX {
        return fail(format_args!("round: chunks {} to {} are no range below {}", round.lo, round.hi, CHUNKS_MAX));
    }
    let (index, params) = &HANDLES.get()[handle as usize];
    let rule = RULES[*index as usize];
    Ok(Call { rule, params: &params[..rule.params()], round, size, rest: n - size })
}

fn open() -> Answer<i64> {
    let n = pull()?;
    let (size, index) = (INPUT.get()[0] as u32 as usize, (INPUT.get()[0] >> 32) as usize);
    if n < 8 || size < 8 || size > n || size % 8 != 0 {
        return fail(format_args!("kv_open: {} bytes are not a record of size, rule index and parameters", n));
    } else if index >= RULES.len() {
        return fail(format_args!("kv_open: rule index is {}; this module has {} rules", index, RULES.len()));
    }
    let (rule, given) = (RULES[index], &INPUT.get()[1..size / 8]);
    if given.len() != rule.params() {
        return fail(format_args!("kv_open: the rule takes {} parameters; {} were given", rule.params(), given.len()));
    } else if given.len() > PARAMS_MAX {
        return fail(format_args!("kv_open: the rule takes {} parameters; raise PARAMS_MAX, which is {}", given.len(), PARAMS_MAX));
    } else if *OPENED.get() == HANDLES_MAX {
        return fail(format_args!("kv_open: this instance has opened {} rules, as many as it keeps", HANDLES_MAX));
    }
    rule.open(given)?;
    let (handle, opened) = (*OPENED.get(), &mut HANDLES.get()[*OPENED.get()]);
    opened.0 = index as u32;
    opened.1[..given.len()].copy_from_slice(given);
    *OPENED.get() += 1;
    Ok(handle as i64)
}

fn scan(handle: i32) -> Answer<usize> {
    let c = begin(handle)?;
    let n = (c.round.hi - c.round.lo) as usize;
    let words = (n + 31) / 32;
    if c.rest < 8 * words {
        return fail(format_args!("kv_scan: the states of {} chunks are {} bytes, but only {} follow the round", n, 8 * words, c.rest));
    }
    let mut first = c.size / 8;
    if c.size % 8 != 0 {
        first = ROUND_BYTES / 8; // after a record of odd size, align the states again
        let p = INPUT.get().as_mut_ptr() as *mut u8;
        unsafe { core::ptr::copy(p.add(c.size), p.add(8 * first), 8 * words) };
    }
    let mut states = States { words: &mut INPUT.get()[first..first + words], count: n as i64 };
    OUTPUT.get()[0] = match c.rule.scan(c.params, &c.round, &mut states, &mut empty(1, n))? {
        Span::Usable(chunks) => chunks as u32 as u64,
        Span::Deferred => 1 << 32,
    };
    Ok(8 + (n + 7) / 8)
}

#[no_mangle]
extern "C" fn kv_abi_1() {}

#[no_mangle]
extern "C" fn kv_manifest() -> i64 {
    view(MANIFEST.as_ptr(), MANIFEST.len())
}

#[no_mangle]
extern "C" fn kv_open() -> i64 {
    open().unwrap_or_else(|no| answer(Err(no)))
}

#[no_mangle]
extern "C" fn kv_reach(handle: i32) -> i64 {
    answer(begin(handle).and_then(|c| {
        let n = (c.round.hi - c.round.lo) as usize;
        c.rule.reach(c.params, &c.round, &mut empty(0, n))?;
        Ok((n + 7) / 8)
    }))
}

#[no_mangle]
extern "C" fn kv_scan(handle: i32) -> i64 {
    answer(scan(handle))
}

#[no_mangle]
extern "C" fn kv_need(handle: i32) -> i64 {
    answer(begin(handle).and_then(|c| {
        let n = c.round.hi as usize;
        c.rule.need(c.params, &c.round, &mut empty(0, n))?;
        Ok((n + 7) / 8)
    }))
}
