// kv.ts: all that a tierd rule in AssemblyScript needs, for ABI version 1. The entry file
// of a module exports the six functions of the ABI and says which rules it holds:
//
//	import { module, Rule, Params, Round, Bitmap, States, Span } from "./kv";
//	export { kv_abi_1, kv_manifest, kv_open, kv_reach, kv_scan, kv_need } from "./kv";
//
//	class MyRule extends Rule { ... }
//	module('{"rules": [{"name": "my-rule", "version": "1.0.0", "kind": "spec", ...}]}', [new MyRule()]);
//
// A module of several rules lists them in the order of the manifest. It is built by
//
//	asc rule.ts -o rule.wasm -O3 --runtime stub --use abort= --exportStart _initialize
//
// The runtime stub never frees memory: make no object in reach, scan and need. This file
// makes all that it needs at the start.
//
// A rule is a pure function of its parameters and the round: keep no state. Chunk indexes
// count from the round's lo; in need they count from 0. Ranges are clipped to the chunks
// asked for, so no answer can be too long; a single index outside of them traps.

/** Chunks of one round. */
export const CHUNKS_MAX: i64 = 1 << 20;
/** Parameters of one rule. */
export const PARAMS_MAX: u32 = 8;
/** Rules opened in one instance; then the host takes a fresh one. */
export const HANDLES_MAX: u32 = 4096;
/** The host keeps no more of a reason. */
export const REASON_BYTES_MAX: u32 = 512;
const ROUND_BYTES: u32 = 104; // the Round record of version 1; those of later minors are longer
const RECORD_BYTES_MAX: u32 = 4096;

/**
 * One request seen by one rule, in tokens, and the chunks asked for: lo <= chunk < hi.
 * What this side cannot know is 0. The record lies in memory as the class does.
 */
@unmanaged
export class Round {
  block_tokens: u64;
  chunk_tokens: u64;
  prompt_tokens: u64;
  stored_tokens: u64;
  resume_tokens: u64;
  align_tokens: u64;
  junction_tokens: u64;
  resident_tokens: u64;
  offers: u64;
  local_tokens: u64;
  bound_tokens: u64;
  lo: u32;
  hi: u32;
}

/** The values of a rule's parameters, in the order of the manifest. */
@unmanaged
export class Params {
  @inline @operator("[]")
  get(i: u32): u64 {
    assert(i < PARAMS_MAX);
    return load<u64>(changetype<usize>(this) + 8 * i);
  }
}

/** What a function returns: it answered, it failed (return fail), or, of need, nothing
 * stored lets attention go on from the token. */
export enum Answer { OK = 0, FAILED = -1, NO_RESUME = -2 }

/** What a scan answers: the usable chunks from lo on; or deferred, and demand marks the
 * chunks whose state must become known first. */
export class Span {
  usable: i64 = 0;
  deferred: bool = false;
}

/** A rule. A policy leaves need as it is. */
export abstract class Rule {
  /** How many parameters it takes. */
  abstract params(): u32;
  abstract open(p: Params): Answer;
  abstract reach(p: Params, r: Round, out: Bitmap): Answer;
  abstract scan(p: Params, r: Round, states: States, demand: Bitmap, span: Span): Answer;
  need(p: Params, r: Round, out: Bitmap): Answer {
    return fail("kv_need: the rule gives no need, which only a policy may leave out");
  }
}

let json = new ArrayBuffer(0), rules: Rule[] = [];

/** Says what this module holds. It is called once, at the start. */
export function module(manifest: string, list: Rule[]): void {
  json = String.UTF8.encode(manifest);
  rules = list;
}

// The reason is written in place, because a string made by + would never be freed.
const reason = heap.alloc(REASON_BYTES_MAX);
let reasonBytes: u32 = 0;

/** Begins the reason that the host shows, in ASCII; text and number go on with it. */
export function fail(s: string): Answer {
  reasonBytes = 0;
  return text(s);
}

export function text(s: string): Answer {
  for (let i = 0; i < s.length && reasonBytes < REASON_BYTES_MAX; i++) store<u8>(reason + reasonBytes++, <u8>s.charCodeAt(i));
  return Answer.FAILED;
}

export function number(v: u64): Answer {
  let unit: u64 = 1;
  while (v / unit >= 10) unit *= 10;
  for (; unit > 0; unit /= 10) if (reasonBytes < REASON_BYTES_MAX) store<u8>(reason + reasonBytes++, <u8>(48 + (v / unit) % 10));
  return Answer.FAILED;
}

/** Fails, in the words of every rule, unless min <= value <= max, as in the manifest. */
export function check(name: string, value: u64, min: u64, max: u64, unit: string): Answer {
  if (value >= min && value <= max) return Answer.OK;
  fail("parameter "); text(name); text(" is "); number(value); text("; it must be "); number(min); text(" to "); number(max);
  if (unit.length > 0) text(" ");
  return text(unit);
}

/** A set of chunks, 64 a word, empty when a rule gets it. */
@final
export class Bitmap {
  constructor(private words: usize, public bits: i64) {}

  /** Makes it an empty set of so many bits. */
  reset(bits: i64): Bitmap {
    this.bits = bits;
    memory.fill(this.words, 0, <usize>(bits + 63) / 64 * 8);
    return this;
  }

  set(i: i64): void {
    assert(i >= 0 && i < this.bits);
    const p = this.words + (<usize>i >> 6 << 3);
    store<u64>(p, load<u64>(p) | <u64>1 << (i & 63));
  }

  /** Sets the bits lo <= i < hi. */
  setRange(lo: i64, hi: i64): void {
    lo = max(lo, 0); hi = min(hi, this.bits);
    while (lo < hi) {
      const p = this.words + (<usize>lo >> 6 << 3), end = (lo | 63) + 1;
      let m = <u64>-1 << (lo & 63);
      if (end > hi) m &= <u64>-1 >> (end - hi);
      store<u64>(p, load<u64>(p) | m);
      lo = end;
    }
  }

  /**
   * Sets the size bits before each of first, first+step and so on, up to last. Only the
   * points whose tails reach into the set are visited. Step must be positive.
   */
  setTails(first: i64, last: i64, step: i64, size: i64): void {
    assert(step > 0);
    if (first <= 0) first += (step - first) / step * step;
    last = min(last, this.bits + size - 1);
    if (first > last) return;
    if (size >= step) this.setRange(first - size, first + (last - first) / step * step); // they touch
    else for (let at = first; at <= last; at += step) this.setRange(at - size, at);
  }
}

/** What a lookup answers for a chunk. */
export enum State { MISS, HIT, PENDING, RETRY }

/** Sets of states, for the searches: the bit 1 << state of each. */
export const ABSENT: u32 = 1 << State.MISS, UNKNOWN: u32 = 1 << State.RETRY, HERE: u32 = 1 << State.HIT | 1 << State.PENDING;

const EVEN: u64 = 0x5555555555555555; // the low bit of each of 32 entries

/** Returns a word with the low bit set of each entry of w that is in c. */
// @ts-ignore: decorator
@inline
function match(c: u32, w: u64): u64 {
  const hi = w >> 1;
  let m: u64 = 0;
  if (c & 1 << State.MISS) m |= ~(w | hi);
  if (c & 1 << State.HIT) m |= w & ~hi;
  if (c & 1 << State.PENDING) m |= hi & ~w;
  if (c & 1 << State.RETRY) m |= w & hi;
  return m & EVEN;
}

/** What a lookup answered for each chunk, 32 a word. */
@final
export class States {
  constructor(private words: usize, public count: i64) {}

  /** Makes it the table of so many states at an address. */
  reset(words: usize, count: i64): States {
    this.words = words;
    this.count = count;
    return this;
  }

  @inline private word(i: i64): u64 { return load<u64>(this.words + (<usize>i >> 5 << 3)); }

  at(i: i64): State {
    assert(i >= 0 && i < this.count);
    return <State>(this.word(i) >> (i & 31) * 2 & 3);
  }

  /** Returns the lowest i in [lo, hi) whose state is in c, or hi. */
  @inline first(c: u32, lo: i64, hi: i64): i64 {
    const end = min(hi, this.count);
    for (let i = max(lo, 0); i < end; i = (i | 31) + 1) {
      const m = match(c, this.word(i)) >> (i & 31) * 2;
      if (m) {
        i += ctz(m) / 2;
        return i < end ? i : hi;
      }
    }
    return hi;
  }

  /** Returns the highest i in [lo, hi) whose state is in c, or lo-1. */
  @inline last(c: u32, lo: i64, hi: i64): i64 {
    const begin = max(lo, 0);
    for (let i = min(hi, this.count) - 1; i >= begin; i = (i & ~31) - 1) {
      const m = match(c, this.word(i)) << (62 - (i & 31) * 2);
      if (m) {
        i -= clz(m) / 2;
        return i >= begin ? i : lo - 1;
      }
    }
    return lo - 1;
  }

  /** Sets in out the bits of the entries lo <= i < hi whose state is in c. */
  mark(c: u32, lo: i64, hi: i64, out: Bitmap): void {
    hi = min(hi, out.bits);
    for (let i = this.first(c, lo, hi); i < hi; i = this.first(c, i + 1, hi)) out.set(i);
  }

  /** Sets the entries lo <= i < hi. The table is the rule's own during this call. */
  fill(lo: i64, hi: i64, state: State): void {
    lo = max(lo, 0); hi = min(hi, this.count);
    while (lo < hi) {
      const p = this.words + (<usize>lo >> 5 << 3), end = (lo | 31) + 1;
      let m = <u64>-1 << (lo & 31) * 2;
      if (end > hi) m &= <u64>-1 >> (end - hi) * 2;
      store<u64>(p, load<u64>(p) & ~m | EVEN * <u64>state & m);
      lo = end;
    }
  }
}

// From here on: the exports, and what is behind them. A call's input is copied to one
// place and its answer left in another; both have room for the largest round.

// @ts-ignore: decorator
@external("kv", "input")
declare function hostInput(to: usize, room: u32): u32;
// @ts-ignore: decorator
@external("kv", "fail")
declare function hostFail(reason: usize, bytes: u32): void;

const IN_BYTES: u32 = RECORD_BYTES_MAX + <u32>CHUNKS_MAX / 4, OUT_BYTES: u32 = 8 + <u32>CHUNKS_MAX / 8;
const HANDLE_BYTES: u32 = 8 + 8 * PARAMS_MAX; // rule index, then the parameters
const input = heap.alloc(IN_BYTES), output = heap.alloc(OUT_BYTES), handles = heap.alloc(HANDLE_BYTES * HANDLES_MAX);
const round = changetype<Round>(input + 8), set = new Bitmap(output, 0), demand = new Bitmap(output + 8, 0);
const states = new States(0, 0), span = new Span();
let opened: u32 = 0, inputBytes: u32 = 0;

function view(a: Answer, p: usize, bytes: i64): i64 {
  if (a == Answer.OK) return <i64>p << 32 | bytes;
  if (a == Answer.FAILED) hostFail(reason, reasonBytes);
  reasonBytes = 0;
  return a;
}

function pull(): Answer {
  inputBytes = hostInput(input, IN_BYTES);
  if (inputBytes <= IN_BYTES) return Answer.OK;
  fail("input of "); number(inputBytes); text(" bytes; at most "); number(IN_BYTES);
  return text(" are read");
}

/** Pulls a call's input and checks its handle and its record. */
function begin(handle: u32): Answer {
  if (pull() != Answer.OK) return Answer.FAILED;
  const size: u32 = inputBytes < 8 ? 0 : load<u32>(input);
  if (handle >= opened) {
    fail("handle "); number(handle); text(" is not open; this instance opened ");
    return number(opened);
  } else if (size < ROUND_BYTES || size > RECORD_BYTES_MAX || size > inputBytes) {
    fail("round record: size "); number(size); text(" in "); number(inputBytes); text(" bytes; version 1 reads ");
    number(ROUND_BYTES); text(" to ");
    return number(RECORD_BYTES_MAX);
  } else if (round.hi < round.lo || round.hi > <u32>CHUNKS_MAX) {
    fail("round: chunks "); number(round.lo); text(" to "); number(round.hi); text(" are no range below ");
    return number(CHUNKS_MAX);
  }
  return Answer.OK;
}

function ruleOf(handle: u32): Rule { return unchecked(rules[load<u32>(handles + handle * HANDLE_BYTES)]); }
function paramsOf(handle: u32): Params { return changetype<Params>(handles + handle * HANDLE_BYTES + 8); }

function open(): Answer {
  if (pull() != Answer.OK) return Answer.FAILED;
  const size = load<u32>(input), index = load<u32>(input, 4), count = (size - 8) / 8;
  if (inputBytes < 8 || size < 8 || size > inputBytes || size % 8) {
    fail("kv_open: "); number(inputBytes);
    return text(" bytes are not a record of size, rule index and parameters");
  } else if (index >= <u32>rules.length) {
    fail("kv_open: rule index is "); number(index); text("; this module has "); number(rules.length);
    return text(" rules");
  } else if (count != rules[index].params()) {
    fail("kv_open: the rule takes "); number(rules[index].params()); text(" parameters; "); number(count);
    return text(" were given");
  } else if (count > PARAMS_MAX) {
    fail("kv_open: the rule takes "); number(count); text(" parameters; raise PARAMS_MAX, which is ");
    return number(PARAMS_MAX);
  } else if (opened == HANDLES_MAX) {
    fail("kv_open: this instance has opened "); number(HANDLES_MAX);
    return text(" rules, as many as it keeps");
  }
  const to = handles + opened * HANDLE_BYTES;
  store<u32>(to, index);
  memory.copy(to + 8, input + 8, 8 * count);
  return rules[index].open(paramsOf(opened));
}

export function kv_abi_1(): void {}

export function kv_manifest(): i64 { return view(Answer.OK, changetype<usize>(json), json.byteLength); }

export function kv_open(): i64 {
  const a = open();
  return a == Answer.OK ? opened++ : view(a, 0, 0);
}

export function kv_reach(handle: u32): i64 {
  if (begin(handle) != Answer.OK) return view(Answer.FAILED, 0, 0);
  const n: i64 = round.hi - round.lo;
  return view(ruleOf(handle).reach(paramsOf(handle), round, set.reset(n)), output, (n + 7) / 8);
}

export function kv_scan(handle: u32): i64 {
  if (begin(handle) != Answer.OK) return view(Answer.FAILED, 0, 0);
  const n: i64 = round.hi - round.lo, size = load<u32>(input), want = <u32>(n + 31) / 32 * 8;
  if (inputBytes - size < want) {
    fail("kv_scan: the states of "); number(n); text(" chunks are "); number(want); text(" bytes, but only ");
    number(inputBytes - size); text(" follow the round");
    return view(Answer.FAILED, 0, 0);
  }
  span.usable = 0;
  span.deferred = false;
  const a = ruleOf(handle).scan(paramsOf(handle), round, states.reset(input + size, n), demand.reset(n), span);
  store<u64>(output, <u64><u32>span.usable | <u64>span.deferred << 32);
  return view(a, output, 8 + (n + 7) / 8);
}

export function kv_need(handle: u32): i64 {
  if (begin(handle) != Answer.OK) return view(Answer.FAILED, 0, 0);
  const n: i64 = round.hi;
  return view(ruleOf(handle).need(paramsOf(handle), round, set.reset(n)), output, (n + 7) / 8);
}
