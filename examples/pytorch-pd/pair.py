"""Two engines, two daemons, and the run without offload that they must equal.

python pair.py --tierd bin/tierd                    on the CPU
python pair.py --tierd bin/tierd --devices cuda:0            both engines on one GPU
python pair.py --tierd bin/tierd --devices cuda:0,cuda:1     one GPU each

README.md says what is asserted. It ends with status 0 when all of it held.
"""

import argparse
import collections
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import torch
import yaml

from engine import WEIGHT_SEED, Engine, gumbel, unpack
from model import random_weights, reference

HERE = os.path.dirname(os.path.abspath(__file__))
PRODUCER, CONSUMER = "node-p", "node-c"
# Blocks of each engine. A prompt of 960 tokens fits a full group twice; a sliding one only
# because blocks that have left the window are used again.
BLOCKS = {"sliding": 32, "full": 72}
DECODE = 8
# How far two runs of the same arithmetic in other shapes may be apart: sums in another
# order. Seen with fp32: 3e-6 of logits up to 2.5.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.25}
READY_S = 60
# How long an engine may take for what it is asked: the longest wait for a daemon is 45 s.
ANSWER_S = 180
# More than two slabs and the blocks of two engines.
SHARED_BYTES = 512 << 20


def hold(fact, text):
    if not fact:
        raise AssertionError(text)


def reason(got):
    """Why a request was not had whole: what the daemon said of it, or how many chunks each cause took."""
    if got["reason"]:
        return got["reason"]
    took = collections.Counter((cause, detail) for _, _, cause, detail in got["failures"])
    return "; ".join(f"{n} {'chunk' if n == 1 else 'chunks'}, {cause}: {detail}" for (cause, detail), n in took.items())


class Daemon:
    """A tierd serve, and what its HTTP port says."""

    def __init__(self, tierd, run, node, port, peer, peer_port, device, slab_dir):
        self.state = os.path.join(run, node)
        shutil.copytree(os.path.join(run, "verdict"), self.state)
        self.log = os.path.join(run, node + ".log")
        self.socket = os.path.join(run, node + ".sock")
        config = {
            "node_id": node,
            "state_dir": self.state,
            "engine_socket": self.socket,
            "peer_listen": f"127.0.0.1:{port}",
            "data_listen": "127.0.0.1:0",
            "http_listen": "127.0.0.1:0",
            "slab_bytes": 64 << 20,
            "slab_dir": slab_dir,
            "deployment": os.path.join(run, "deployment.yaml"),
            "device": device,
            # Three times the defaults: three processes that load PyTorch share the cores.
            "deadlines": {"connect_ms": 2250, "suspect_ms": 2250, "dead_ms": 6000},
            "peers": [{"id": peer, "control": f"127.0.0.1:{peer_port}"}],
        }
        self.command = [tierd, "serve", "-c", os.path.join(run, node + ".yaml")]
        with open(self.command[-1], "w") as f:
            yaml.safe_dump(config, f)
        self.start()

    def start(self):
        with open(self.log, "a") as f:
            self.process = subprocess.Popen(self.command, stdout=f, stderr=f)

    def ready(self):
        """Waits until engines may attach and the peer is there."""
        end = time.monotonic() + READY_S
        while True:
            hold(self.process.poll() is None, f"the daemon ended with status {self.process.poll()}; see its log")
            hold(time.monotonic() < end, f"the daemon was not ready after {READY_S} s; see its log")
            if os.path.exists(os.path.join(self.state, "addresses.json")):
                m = self.metrics()
                if any(k.startswith("tierd_peer_state{") and 'state="ready"' in k and v == 1 for k, v in m.items()):
                    return
            time.sleep(0.05)

    def metrics(self):
        with open(os.path.join(self.state, "addresses.json")) as f:
            where = json.load(f)["http_listen"]
        out = {}
        with urllib.request.urlopen(f"http://{where}/metrics", timeout=5) as reply:
            for line in reply.read().decode().splitlines():
                if line and not line.startswith("#"):
                    key, value = line.rsplit(" ", 1)
                    out[key] = float(value)
        return out

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Worker:
    """An engine.py process."""

    def __init__(self, run, name, daemon, device, kind):
        self.name = name
        self.log = open(os.path.join(run, name + ".log"), "w")
        command = [
            sys.executable,
            os.path.join(HERE, "engine.py"),
            "--name",
            name,
            "--socket",
            daemon.socket,
            "--device",
            device,
        ]
        command += [
            "--memory",
            kind,
            "--deployment",
            os.path.join(run, "deployment.yaml"),
            "--blocks",
            json.dumps(BLOCKS),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self):
        # One line for each request: none is in the buffer of an answer before.
        there, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        hold(there, f"engine {self.name} gave no answer in {ANSWER_S} s; see its log")
        line = self.process.stdout.readline()
        hold(line, f"engine {self.name} ended; see its log")
        return json.loads(line)

    def stop(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended with a request unread
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Truth:
    """What no daemon has touched: the engine alone, and Hugging Face's model."""

    def __init__(self, deployment, device, dtype):
        self.engine = Engine(deployment, device, {name: 2 * n for name, n in BLOCKS.items()})
        self.vocabulary, self.dtype = self.engine.config.vocab_size, dtype
        self.model = self.version = None
        try:
            import transformers
        except ImportError as err:
            print(f"not compared with Hugging Face's Gemma 3: {err}")
            return
        self.version = transformers.__version__
        self.model = reference(
            self.engine.config, random_weights(self.engine.config, WEIGHT_SEED), device, self.engine.model.dtype
        )

    def alone(self, prompt, seed, resume):
        return self.engine.alone(prompt, gumbel(seed, DECODE, self.vocabulary), resume)

    def others(self, prompt, seed, tokens, rows):
        """The distance to other shapes: the prompt in one step, and Hugging Face's model."""
        noise = gumbel(seed, DECODE, self.vocabulary)
        one_tokens, one_rows = self.engine.alone(prompt, noise, one_step=True)
        # In fp32 the draws are far enough apart; in bf16 they need not be, and after
        # another token there is nothing to compare.
        same = [i for i in range(DECODE) if one_tokens[:i] == tokens[:i]]
        far = {"one step": float((one_rows.cpu()[same] - rows[same]).abs().max())}
        if self.model:
            hf = self.model(prompt + tokens[:-1])[len(prompt) - 1 :].to(rows.dtype).cpu()
            far["transformers"] = float((hf - rows).abs().max())
            hold(
                self.dtype != "fp32" or [int((r.float() + n).argmax()) for r, n in zip(hf, noise)] == tokens,
                "tokens differ from Hugging Face's model",
            )
        hold(self.dtype != "fp32" or one_tokens == tokens, "tokens differ from the run in one step")
        for what, d in far.items():
            hold(d <= TOLERANCE[self.dtype], f"logits are {d} from those of {what}; at most {TOLERANCE[self.dtype]}")
        return far


class Oracle:
    """What a plan must be, from the masks of the model and not from any rule's code."""

    def __init__(self, deployment):
        self.groups = {g["name"]: g for g in deployment["groups"]}
        self.chunk = {n: g["block_tokens"] * g["chunk_blocks"] for n, g in self.groups.items()}
        self.common, self.align = max(self.chunk.values()), deployment["align_tokens"]
        hold(all(self.common % c == 0 for c in self.chunk.values()), "the largest chunk is no multiple of the others")

    def resume(self, prompt):
        return min(prompt - 1, prompt // self.common * self.common)

    def aligned(self, tokens):
        """Where a text can be resumed of which so many tokens are there."""
        return tokens // self.align * self.align

    def needed(self, resume):
        """The chunks that attention reads to go on from a token."""
        out = {}
        for name, g in self.groups.items():
            first = max(0, resume + 1 - g["params"]["window"]) if g["rule"] == "window" else 0
            if resume:
                out[name] = list(range(first // self.chunk[name], -(-resume // self.chunk[name])))
        return out

    def whole(self, prompt):
        return {name: prompt // c for name, c in self.chunk.items()}

    def bytes(self, dtype):
        size = {"fp32": 4, "bf16": 2}[dtype]
        return {
            n: 2 * g["layers"] * self.chunk[n] * g["kv_heads"] * g["head_dim"] * size for n, g in self.groups.items()
        }


class Pair:
    """The two workers, and the checks of one request."""

    def __init__(self, producer, consumer, truth, oracle, seed, dtype):
        self.producer, self.consumer = producer, consumer
        self.truth, self.oracle, self.dtype = truth, oracle, dtype
        self.draw, self.seed, self.number = random.Random(seed), seed, 0
        self.moved = {name: 0 for name in oracle.groups}
        self.lost = {name: 0 for name in oracle.groups}
        self.prompt_chunks = {name: 0 for name in oracle.groups}
        self.worst = {}

    def prompt(self, length):
        return [self.draw.randrange(self.truth.vocabulary) for _ in range(length)]

    def request(self, prompt, leg):
        self.number += 1
        return {
            "id": f"r{self.number}",
            "prompt": prompt,
            "leg": leg,
            "seed": self.seed + self.number,
            "decode": DECODE,
        }

    def consume(self, request, **more):
        self.consumer.ask(do="consume", peer=PRODUCER, **request, **more)

    def produce(self, request, **more):
        self.producer.ask(do="produce", peer=CONSUMER, **request, **more)

    def equal(self, request, got):
        """Tokens and logits are those of the run without offload, bit for bit."""
        tokens, rows = self.truth.alone(request["prompt"], request["seed"], got["resume"])
        mine = unpack(got["logits"])
        hold(bool(torch.isfinite(mine.float()).all()), "logits are not numbers: attention has read what is not there")
        rows = rows.cpu()
        hold(
            torch.equal(mine.view(torch.uint8), rows.contiguous().view(torch.uint8)),
            f"logits differ from the run without offload by up to {float((mine.float() - rows.float()).abs().max())}",
        )
        hold(got["tokens"] == tokens, f"tokens {got['tokens']} differ from {tokens} without offload")
        return tokens, rows

    def pulled(self, length, leg, early):
        """One prompt through both daemons, in the order of early: who begins first."""
        prompt = self.prompt(length)
        request = self.request(prompt, leg)
        if early:
            self.consume(request, spoil=True)
            time.sleep(0.05)
        self.produce(request)
        if early:
            made, got = self.producer.answer(), self.consumer.answer()
        else:
            made = self.producer.answer()
            self.consume(request, spoil=True)
            got = self.consumer.answer()
        resume = self.oracle.resume(length)
        hold(
            made["computed"] == length and not made["aborted"],
            f"the producer computed {made['computed']} of {length} tokens",
        )
        hold(
            got["resume"] == got["planned"] == resume,
            f"resumed at {got['resume']}, planned {got['planned']}, possible {resume}: {got['reason']} {got['failures']}",
        )
        hold(
            got["computed"] == length - resume,
            f"the consumer computed {got['computed']} tokens of the prompt instead of {length - resume}",
        )
        self._moved(got, length, resume)
        tokens, rows = self.equal(request, got)
        least = self._spoiled(got)
        far = self.truth.others(prompt, request["seed"], tokens, rows)
        for what, d in far.items():
            self.worst[what] = max(self.worst.get(what, 0), d)
        n = {name: len(c) for name, c in got["loaded"].items()}
        whole = self.oracle.whole(length)
        parts = ", ".join(f"{name} {n.get(name, 0)} of {whole[name]}" for name in whole)
        print(
            f"{request['id']:>4} {leg:6} {'early' if early else 'late':5} prompt {length:4}  resumed {resume:4}  computed {got['computed']:3}  chunks {parts:30}  equal{least}",
            flush=True,
        )

    def _moved(self, got, length, resume):
        needed = self.oracle.needed(resume)
        hold(
            got["loaded"] == got["demand"] == needed,
            f"loaded {got['loaded']}, demanded {got['demand']}, needed {needed}",
        )
        size = self.oracle.bytes(self.dtype)
        for name in self.oracle.groups:
            n, c = len(needed.get(name, ())), got["groups"].get(name)
            want = {"demanded": n, "transferred": n, "unmatched": 0, "bytes": n * size[name]}
            have = {key: c[key] if c else 0 for key in want}
            hold(have == want, f"group {name}: the daemon counts {have}, expected {want}")
            self.moved[name] += n
            self.prompt_chunks[name] += self.oracle.whole(length)[name]

    def _spoiled(self, got):
        if not got["resume"]:
            hold(not got["spoiled"], "nothing was loaded, but something was spoiled")
            return ""
        hold(sum(map(len, got["loaded"].values())) == len(got["spoiled"]), "not every loaded chunk was spoiled")
        group, chunk, least = min(got["spoiled"], key=lambda s: s[2])
        bound = TOLERANCE[self.dtype] if self.dtype == "fp32" else 0
        hold(
            least > bound,
            f"logits differ by {least} only when chunk {chunk} of group {group} is zeroed; more than {bound} was to be seen",
        )
        return f"; without one chunk >= {least:.1e} off"

    def alone(self, what, request, got, took, failures=None):
        """A request that the consumer had to compute itself, in whole or in part."""
        self.equal(request, got)
        hold(
            got["computed"] == len(request["prompt"]) - got["resume"],
            f"computed {got['computed']} tokens from {got['resume']} on",
        )
        why = reason(got)
        why = f". {why}" if why else ""
        print(
            f"{request['id']:>4} {what}: resumed {got['resume']} of {len(request['prompt'])}, {took:.2f} s, equal{why}",
            flush=True,
        )

    def count(self, got):
        """Adds what a request's own counts say, for counters to find again."""
        for name, c in got["groups"].items():
            self.lost[name] += c["unmatched"]
            self.moved[name] += c["transferred"]

    def timed(self, request, **more):
        begun = time.monotonic()
        self.consume(request, **more)
        return self.consumer.answer(), time.monotonic() - begun


def lengths(draw, common, n):
    """Prompts that end inside a chunk, at one's end, just behind it, and before the first."""
    out = [draw.randrange(1, common), common * draw.randrange(2, 12), common * draw.randrange(2, 12) + 1]
    while len(out) < n:
        out.append(draw.randrange(common + 1, 960))
    return out


def legs(pair, n):
    """Prompts whose KV is pulled whole."""
    for i, length in enumerate(lengths(pair.draw, pair.oracle.common, n)):
        pair.pulled(length, "pd", early=i % 2 == 0)
    pair.pulled(pair.draw.randrange(300, 900), "demand", early=True)
    pair.pulled(pair.draw.randrange(300, 900), "probe", early=False)


def shared(pair):
    """Leg demand, where the two prompts are the same only at their beginning."""
    same = pair.draw.randrange(300, 600)
    prefix = pair.prompt(same)
    there = pair.request(prefix + pair.prompt(pair.draw.randrange(100, 300)), "demand")
    here = {**there, "prompt": prefix + pair.prompt(pair.draw.randrange(100, 300))}
    begun = time.monotonic()
    pair.consume(here)
    pair.produce(there)
    pair.producer.answer()
    got, took = pair.consumer.answer(), time.monotonic() - begun
    kept = pair.oracle.aligned(same)
    hold(
        got["resume"] == kept < got["planned"],
        f"{same} tokens are shared and {kept} can be had, but the consumer resumed at {got['resume']}, planned {got['planned']}: {got['reason']}",
    )
    for name, needed in pair.oracle.needed(kept).items():
        hold(
            set(needed) <= set(got["loaded"][name]),
            f"group {name}: chunks {needed} are needed, {got['loaded'][name]} were loaded",
        )
    pair.count(got)
    pair.alone(f"another prompt after {same} tokens, leg demand", here, got, took)


def withheld(pair):
    """Producers that stop early, or never begin."""
    request = pair.request(pair.prompt(pair.draw.randrange(700, 900)), "pd")
    steps = pair.draw.randrange(5, 8)
    pair.produce(request, stop_after=steps)
    made = pair.producer.answer()
    hold(
        made["aborted"] and made["computed"] == steps * pair.oracle.common,
        f"the producer was to stop after {steps} steps: {made['computed']}",
    )
    got, took = pair.timed(request)
    hold(
        got["failures"] and got["resume"] < got["planned"],
        f"the producer stopped early, but the consumer resumed at {got['resume']}, planned {got['planned']}",
    )
    pair.count(got)
    pair.alone(f"producer stopped at {made['computed']}, leg pd", request, got, took)

    again = {**request, "id": request["id"] + "b", "leg": "probe"}
    got, took = pair.timed(again)
    kept = pair.oracle.aligned(made["computed"])
    hold(
        got["resume"] == kept, f"of {made['computed']} stored tokens a probe finds {got['resume']}, and {kept} are kept"
    )
    pair.count(got)
    pair.alone("the same prompt, leg probe", again, got, took)

    request = pair.request(pair.prompt(pair.draw.randrange(300, 900)), "pd")
    got, took = pair.timed(request, deadline_ms=1000)
    hold(
        got["resume"] == 0 and got["planned"] and got["failures"],
        f"nobody produced, but the consumer resumed at {got['resume']}",
    )
    hold(took < 10, f"a request of 1 s waited {took:.1f} s")
    pair.count(got)
    pair.alone("producer never began, deadline 1 s", request, got, took)


def counters(pair, producer, consumer):
    """The daemons' counters say the same: what was loaded came through the peer."""
    here, there = consumer.metrics(), producer.metrics()
    size = pair.oracle.bytes(pair.dtype)

    def total(m, name, **labels):
        return sum(
            v for k, v in m.items() if k.split("{")[0] == name and all(f'{a}="{b}"' in k for a, b in labels.items())
        )

    for name in pair.oracle.groups:
        got = total(here, "tierd_transferred_chunks_total", group=name)
        hold(
            got == pair.moved[name] > 0,
            f"group {name}: {got} chunks came from the peer by the consumer's counter, {pair.moved[name]} by its requests",
        )
        sent = total(there, "tierd_peer_ended_chunks_total", group=name, end="transferred")
        # One that was under way when the consumer had heard enough is aborted over there.
        aborted = total(there, "tierd_peer_ended_chunks_total", group=name, end="aborted")
        hold(
            sent <= got <= sent + aborted,
            f"group {name}: the producer sent {sent} chunks and aborted {aborted}, the consumer got {got}",
        )
        lost = total(here, "tierd_unmatched_chunks_total", group=name)
        hold(
            lost == pair.lost[name],
            f"group {name}: {lost} chunks unmatched by the counter, {pair.lost[name]} by the requests",
        )
    read = total(here, "tierd_kv_offload_tiering_read_bytes_total", tier="1:peer")
    want = sum(pair.moved[n] * size[n] for n in size)
    hold(read == want, f"{read} bytes came from the peer, {want} were expected")
    bad = total(here, "tierd_kv_offload_tiering_checksum_failures_chunks_total")
    hold(bad == 0, f"{bad} chunks had a wrong checksum")
    window = "sliding"
    hold(pair.moved[window] < pair.prompt_chunks[window], "sliding layers demanded every chunk")
    moved = ", ".join(f"{n} {pair.moved[n]} chunks" for n in size)
    print(
        f"     through the peer: {moved}, {read / 1e6:.1f} MB; sliding layers pulled {pair.moved[window]} of the {pair.prompt_chunks[window]} chunks of their prompts"
    )


def faults(pair, producer, consumer):
    """Daemons that freeze and die: requests go on.

    The longest wait is that for a peer that is gone, 2.25 s; for a daemon that is frozen it is
    1 s of the call's and 0.25 s of giving it up. The bounds are far above that, and above the
    arithmetic.
    """
    request = pair.request(pair.prompt(pair.draw.randrange(300, 900)), "pd")
    consumer.process.send_signal(signal.SIGSTOP)
    try:
        got, took = pair.timed(request, call_timeout_s=1.0)
    finally:
        consumer.process.send_signal(signal.SIGCONT)
    hold(
        got["resume"] == 0 and took < 10,
        f"the daemon was frozen, but the request resumed at {got['resume']} after {took:.1f} s",
    )
    pair.alone("own daemon frozen, calls have 1 s", request, got, took)
    pair.consumer.ask(do="patience", call_timeout_s=20.0)
    pair.consumer.answer()
    pair.pulled(pair.draw.randrange(300, 900), "pd", early=False)

    request = pair.request(pair.prompt(pair.draw.randrange(300, 900)), "pd")
    producer.stop(signal.SIGKILL)
    got, took = pair.timed(request)
    hold(
        got["resume"] == 0 and took < 10,
        f"the peer was killed, but the request resumed at {got['resume']} after {took:.1f} s",
    )
    pair.alone("peer killed", request, got, took)

    request = pair.request(pair.prompt(pair.draw.randrange(300, 900)), "pd")
    pair.produce(request)
    made = pair.producer.answer()
    hold(
        made["computed"] == len(request["prompt"]) and made["reason"],
        f"without its daemon the prefill engine computed {made['computed']} tokens",
    )
    print(
        f"{request['id']:>4} the prefill engine without its daemon: computed {made['computed']} tokens. {made['reason']}"
    )
    os.remove(os.path.join(producer.state, "addresses.json"))
    producer.start()
    producer.ready()
    pair.producer.ask(do="attach")
    pair.producer.answer()
    pair.pulled(pair.draw.randrange(300, 900), "pd", early=True)
    request = pair.request(pair.prompt(pair.draw.randrange(300, 900)), "pd")
    begun = time.monotonic()
    pair.consume(request)
    end = time.monotonic() + READY_S
    while not consumer.metrics().get("tierd_fetch_jobs_in_work"):
        hold(time.monotonic() < end, "the consumer's daemon does not fetch")
        time.sleep(0.02)
    time.sleep(0.3)  # the load waits by now
    consumer.stop(signal.SIGKILL)
    got, took = pair.consumer.answer(), time.monotonic() - begun
    hold(
        got["resume"] == 0 and took < 10,
        f"the daemon was killed, but the request resumed at {got['resume']} after {took:.1f} s",
    )
    pair.alone("own daemon killed in the middle of a load", request, got, took)
    request = pair.request(pair.prompt(pair.draw.randrange(300, 900)), "pd")
    got, took = pair.timed(request)
    pair.alone("the next one", request, got, took)


def play(a, run, slab_dir, started):
    devices = (a.devices.split(",") * 2)[:2]
    with open(os.path.join(HERE, "deployment.yaml")) as f:
        text = f.read().replace("dtype: fp32", f"dtype: {a.dtype}")
    with open(os.path.join(run, "deployment.yaml"), "w") as f:
        f.write(text)
    checked = subprocess.run(
        [a.tierd, "check", "--state", os.path.join(run, "verdict"), os.path.join(run, "deployment.yaml")],
        capture_output=True,
        text=True,
    )
    hold(checked.returncode == 0, f"tierd check: {checked.stdout}{checked.stderr}")
    ports = free_ports(2)
    held = ["mem" if d == "cpu" else d for d in devices]
    producer = Daemon(a.tierd, run, PRODUCER, ports[0], CONSUMER, ports[1], held[0], slab_dir)
    started.append(producer)
    consumer = Daemon(a.tierd, run, CONSUMER, ports[1], PRODUCER, ports[0], held[1], slab_dir)
    started.append(consumer)
    truth = Truth(text, devices[1], a.dtype)
    producer.ready()
    consumer.ready()
    workers = []
    for name, daemon, device in (("prefill", producer, devices[0]), ("decode", consumer, devices[1])):
        workers.append(Worker(run, name, daemon, device, a.memory))
        started.append(workers[-1])
    for w, device in zip(workers, devices):
        hello = w.answer()
        print(
            f"engine {w.name}: PyTorch {hello['torch']} on {device}, daemon {hello['node_id']} on {' '.join(filter(None, (hello['device'], hello['uuid'])))}, deployment {hello['verdict']}"
        )
    print(f"seed {a.seed}, {a.dtype}, memory {a.memory}, transformers {truth.version or 'not there'}", flush=True)
    pair = Pair(*workers, truth, Oracle(yaml.safe_load(text)), a.seed, a.dtype)
    legs(pair, a.prompts)
    shared(pair)
    withheld(pair)
    counters(pair, producer, consumer)
    faults(pair, producer, consumer)
    far = ", ".join(f"{what} {d:.1e}" for what, d in pair.worst.items())
    print(
        f"done: tokens and logits are those of the run without offload, bit for bit; farthest from the same prompt in other shapes: {far}"
    )


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tierd", required=True, help="the tierd executable")
    p.add_argument(
        "--devices", default="cpu", help="cpu, cuda:0 or cuda:0,cuda:1: of the prefill and of the decode engine"
    )
    p.add_argument("--gpus", action="store_true", help="several runs, on one GPU and, where there are more, on two")
    p.add_argument(
        "--memory",
        default="",
        choices=("", "file", "file-layers", "ipc", "torch"),
        help="whose memory the KV blocks are in; default file, on a GPU torch",
    )
    p.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    p.add_argument("--prompts", type=int, default=8, help="prompts of leg pd")
    p.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not a.gpus:
        return run(a)
    if not torch.cuda.is_available():
        print(f"skipped: PyTorch {torch.__version__} sees no GPU")
        return 0
    for devices in ["cuda:0", "cuda:0,cuda:1"][: torch.cuda.device_count()]:
        for kind, dtype in (("torch", "fp32"), ("ipc", "bf16")):
            a.devices, a.memory, a.dtype = devices, kind, dtype
            if run(a):
                return 1
    if torch.cuda.device_count() == 1:
        print("skipped: the run on two GPUs, for there is one")
    return 0


def shared_memory():
    """/dev/shm where it has room for both daemons and what they allocate; a container's may not."""
    shm = "/dev/shm"
    if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= SHARED_BYTES:
        return shm
    return None


def run(a):
    a.memory = a.memory or ("file" if a.devices == "cpu" else "torch")
    if (a.devices == "cpu") != a.memory.startswith("file"):
        sys.exit(
            f"--memory {a.memory} is not for --devices {a.devices}: file and file-layers are host memory, ipc and torch are a GPU's"
        )
    run = tempfile.mkdtemp(prefix="tierd-pytorch-", dir="/tmp")  # the path of a socket is short
    slab_dir = tempfile.mkdtemp(prefix="tierd-pytorch-", dir=shared_memory() or run)
    started, failed = [], True
    begun = time.monotonic()
    try:
        play(a, run, slab_dir, started)
        failed = False
    except AssertionError as err:
        print(f"FAILED (seed {a.seed}): {err}")
    finally:
        for s in reversed(started):
            s.stop()
        if failed:
            for s in started:
                log = s.log if isinstance(s.log, str) else s.log.name
                with open(log) as f:
                    print(f"--- the end of {log}\n{''.join(f.readlines()[-25:])}")
        shutil.rmtree(run)
        shutil.rmtree(slab_dir, ignore_errors=True)
    if not failed:
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
