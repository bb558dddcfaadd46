// A module that tries the SDK: the rule probe does in its scan what its parameters say, and
// echo is a policy, so that the module has two rules.
import { module, fail, text, number, Rule, Params, Round, Bitmap, States, State, Span, Answer, HERE } from "./kv";
export { kv_abi_1, kv_manifest, kv_open, kv_reach, kv_scan, kv_need } from "./kv";

class Probe extends Rule {
  params(): u32 { return 4; }
  open(p: Params): Answer { return Answer.OK; }

  reach(p: Params, r: Round, out: Bitmap): Answer {
    fail("100%: no reach, "); number(u32.MAX_VALUE); text(" or ");
    return number(u64.MAX_VALUE);
  }

  scan(p: Params, r: Round, s: States, demand: Bitmap, span: Span): Answer {
    const c = <u32>p[1], lo = <i64>p[2] - 64, hi = <i64>p[3] - 64;
    switch (<u32>p[0]) {
      case 0: span.usable = s.first(c, lo, hi); break;
      case 1: span.usable = s.last(c, lo, hi); break;
      case 2: s.mark(c, lo, hi, demand); break;
      case 3: s.fill(lo, hi, <State>(c & 3)); s.mark(HERE, 0, s.count, demand); break;
      case 4: demand.setRange(lo, hi); break;
      case 5: demand.set(lo); break;
      case 6: span.usable = s.at(lo); break;
      case 7: return Answer.NO_RESUME;
      case 8: demand.setTails(lo, hi, c + 1, (lo + 64) & 31); break;
    }
    return Answer.OK;
  }

  need(p: Params, r: Round, out: Bitmap): Answer { return Answer.NO_RESUME; }
}

class Echo extends Rule {
  params(): u32 { return 0; }
  open(p: Params): Answer { return Answer.OK; }

  reach(p: Params, r: Round, out: Bitmap): Answer {
    out.setRange(0, out.bits);
    return Answer.OK;
  }

  scan(p: Params, r: Round, s: States, demand: Bitmap, span: Span): Answer {
    span.usable = s.count;
    return Answer.OK;
  }
}

module(
  `{"rules": [
    {"name": "probe", "version": "1", "kind": "spec", "mask": "unverified", "params": [
      {"name": "op", "min": 0, "max": 9}, {"name": "class", "min": 0, "max": 15}, {"name": "lo", "min": 0, "max": 1024}, {"name": "hi", "min": 0, "max": 1024}]},
    {"name": "echo", "version": "1", "kind": "policy"}
  ]}`,
  [new Probe(), new Echo()]);
