"""An engine: the model of model.py on a paged KV cache, with or without a daemon.

As a program it is one process of the pair: it attaches to the daemon of its node and does
what pair.py says, a JSON object a line on standard input, an answer a line on standard
output. As a module it is also the run without offload that pair.py compares with.

Blocks that hold nothing are full of NaN. Attention that reads a position nobody has
computed or loaded gives NaN logits, so a wrong block cannot go unseen.
"""

import argparse
import base64
import json
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import torch
import yaml

from model import FULL, SLIDING, Config, Model, random_weights
from tierd_engine import Client, Gone, Refused, blocks_of, memory, pb, prefix_hashes

WEIGHT_SEED = 7
TENANT = b"pytorch-pd"


def exact_arithmetic():
    """The same operation on the same shapes gives the same bits, here and in each process."""
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports a compiler
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


class Pool:
    """The blocks of one group."""

    def __init__(self, group, blocks):
        self.group, self.blocks = group, blocks
        self.kv = []  # (K, V) of each layer, [blocks, block_tokens, kv_heads, head_dim]
        self.free = []

    def use(self, kv):
        self.kv, self.free = kv, list(range(self.blocks))
        self.fill(self.free, float("nan"))

    def fill(self, ids, value):
        if ids:
            at = torch.tensor(ids, device=self.kv[0][0].device)
            for k, v in self.kv:
                k[at] = value
                v[at] = value

    def copy(self, ids):
        at = torch.tensor(ids, device=self.kv[0][0].device)
        return [(k[at], v[at]) for k, v in self.kv]

    def paste(self, ids, copies):
        at = torch.tensor(ids, device=self.kv[0][0].device)
        for (k, v), (ck, cv) in zip(self.kv, copies):
            k[at], v[at] = ck, cv

    def take(self):
        if not self.free:
            raise MemoryError(f"all {self.blocks} blocks of group {self.group.name} are in use")
        return self.free.pop()

    def give(self, ids):
        self.fill(ids, float("nan"))
        self.free.extend(ids)


class Sequence:
    """One request's block tables. None stands for a block that is not there."""

    def __init__(self, engine, tokens):
        self.engine, self.tokens = engine, list(tokens)
        self.tables = {name: [] for name in engine.pools}
        self.told = {name: set() for name in engine.pools}

    def room(self, name, first, end):
        """Sees to blocks first..end-1 of a group and returns their ids."""
        table = self.tables[name]
        table.extend([None] * (end - len(table)))
        for b in range(first, end):
            if table[b] is None:
                table[b] = self.engine.pools[name].take()
        return table[first:end]

    def drop(self, name, logical):
        table = self.tables[name]
        ids = [table[b] for b in logical if table[b] is not None]
        for b in logical:
            table[b] = None
        self.engine.pools[name].give(ids)

    def slide(self, n):
        """Frees what attention does not read from token n on."""
        for name, pool in self.engine.pools.items():
            first = self.engine.first_read(pool.group, n) // pool.group.block_tokens
            self.drop(name, range(min(first, len(self.tables[name]))))

    def close(self):
        for name, table in self.tables.items():
            self.drop(name, range(len(table)))

    def untold(self):
        """The blocks that the daemon has not heard of, as pb.BlockRuns."""
        runs = []
        for name, table in self.tables.items():
            for b, id in enumerate(table):
                if id is None or b in self.told[name]:
                    continue
                self.told[name].add(b)
                if runs and runs[-1].group == name and runs[-1].first_block + len(runs[-1].ids) == b:
                    runs[-1].ids.append(id)
                else:
                    runs.append(pb.BlockRun(group=name, first_block=b, ids=[id]))
        return runs


class Step:
    """The cache as the model sees it in one step, from token start up to end."""

    def __init__(self, sequence, start, end):
        self.engine, self.groups = sequence.engine, {}
        device = self.engine.device
        for name, pool in self.engine.pools.items():
            g, bt = pool.group, pool.group.block_tokens
            sequence.room(name, start // bt, -(-end // bt))
            lo = self.engine.first_read(g, start)
            past = sequence.tables[name][lo // bt : -(-end // bt)]
            if None in past:
                raise RuntimeError(
                    f"group {name}: attention at token {start} reads block {lo // bt + past.index(None)}, which is not there"
                )
            at = torch.arange(start, end)
            table = torch.tensor([-1 if id is None else id for id in sequence.tables[name]])
            self.groups[name] = (
                table[at // bt].to(device),
                (at % bt).to(device),
                torch.tensor(past, device=device),
                lo,
                lo % bt,
                end - lo,
            )

    def put(self, layer, k, v):
        name, i = self.engine.place[layer]
        ids, offsets, *_ = self.groups[name]
        keys, values = self.engine.pools[name].kv[i]
        keys[ids, offsets], values[ids, offsets] = k, v

    def get(self, layer):
        name, i = self.engine.place[layer]
        _, _, past, lo, skip, length = self.groups[name]
        return lo, *(t[past].flatten(0, 1)[skip : skip + length] for t in self.engine.pools[name].kv[i])


class Engine:
    """A model, its pools and, once attached, a daemon."""

    def __init__(self, deployment, device, blocks):
        exact_arithmetic()
        self.config, self.device = Config(), torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.deployment = yaml.safe_load(deployment)
        groups = [memory.Group.of(g) for g in self.deployment["groups"]]
        self.pools = {g.name: Pool(g, blocks[g.name]) for g in groups}
        self.chunk_blocks = {g.name: g.chunk_blocks for g in groups}
        self._fit(groups)
        # Steps end at multiples of this, which a resume point mostly is.
        self.grid = max(g.chunk_tokens for g in groups)
        self.model = Model(self.config, random_weights(self.config, WEIGHT_SEED), self.device, groups[0].dtype)
        self.client, self.events, self.computed = None, [], 0
        self.own_memory()

    def _fit(self, groups):
        """Finds the group of each layer, and refuses a deployment of another model."""
        kinds = {"window": SLIDING, "full": FULL}
        self.place, used = {}, {g.name: 0 for g in groups}
        for layer, kind in enumerate(self.config.layer_types):
            g = next(g for g in groups if kinds[g.rule] == kind)
            self.place[layer] = (g.name, used[g.name])
            used[g.name] += 1
        for g in groups:
            here = (
                used[g.name],
                self.config.kv_heads,
                self.config.head_dim,
                self.config.window if g.rule == "window" else None,
            )
            there = (g.layers, g.kv_heads, g.head_dim, g.params.get("window"))
            if here != there:
                raise ValueError(
                    f"group {g.name}: the model has (layers, heads, head size, window) {here}, the deployment {there}"
                )

    def first_read(self, group, n):
        """The first token that attention reads to compute token n."""
        return max(0, n + 1 - group.params["window"]) if group.rule == "window" else 0

    # Memory: the engine's own, or shared with the daemon.

    def own_memory(self):
        for pool in self.pools.values():
            kv, _ = self._layers(pool)
            pool.use(kv)

    def _layers(self, pool):
        """A tensor for each layer, as engines have them, and where the pages are."""
        g = pool.group
        bytes_ = 2 * pool.blocks * g.page_bytes
        tensors = [torch.zeros(bytes_, dtype=torch.uint8, device=self.device) for _ in range(g.layers)]
        strides = memory.layer_by_layer(g, pool.blocks, memory_per_layer=True)
        return memory.views(tensors, strides, g, pool.blocks), (tensors, strides)

    def attach(self, name, socket, kind):
        """Attaches with memory of one of four kinds.

        file: the daemon's file, block by block. file-layers: the same, layer by layer.
        ipc: GPU memory of the daemon's. torch: GPU tensors of this process, one a layer.
        """
        regions, kept, more = [], {}, {}
        for group, pool in self.pools.items():
            region = pb.Region(group=group, blocks=pool.blocks)
            if kind == "torch":
                kv, (tensors, strides) = self._layers(pool)
                region.memory.extend(memory.export_cuda(t) for t in tensors)
                region.layout.extend(strides)
                kept[group] = kv
            elif kind != "file":
                region.layout.extend(memory.layer_by_layer(pool.group, pool.blocks))
            regions.append(region)
        if kind in ("ipc", "torch"):
            event = torch.cuda.Event(interprocess=True)
            event.record(torch.cuda.current_stream(self.device))
            self.events = [event]
            more = {
                "accepts": [pb.MEMORY_CUDA_IPC],
                "device_uuid": memory.device_uuid(self.device),
                "events": [event.ipc_handle()],
            }
        self.client = Client(socket)
        reply = self.client.attach(name, regions, **more)
        for region in reply.regions:
            pool = self.pools[region.group]
            kv = kept.get(region.group)
            if kv is None:
                strides = list(region.layout) if kind != "file" else memory.block_by_block(pool.group)
                kv = memory.views([memory.map_region(region, self.device)], strides, pool.group, pool.blocks)
            pool.use(kv)
        return reply

    def leave(self):
        """Goes on alone: what is shared with the daemon is not used any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.own_memory()  # before the daemon frees the other
        self.client.close()
        self.client, self.events = None, []

    def ready(self):
        """Says to the daemon that what was launched so far is done: the number of an event."""
        if not self.events:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return 0
        self.events[0].record(torch.cuda.current_stream(self.device))
        return 1

    # Computing.

    def step(self, sequence, start, end):
        self.computed += end - start
        return self.model.step(sequence.tokens[start:end], start, Step(sequence, start, end))

    def steps(self, start, end):
        """Where the steps of a prefill begin and end: at multiples of the grid."""
        while start < end:
            stop = min((start // self.grid + 1) * self.grid, end)
            yield start, stop
            start = stop

    def prefill(self, sequence, start):
        for a, b in self.steps(start, len(sequence.tokens)):
            logits = self.step(sequence, a, b)
            sequence.slide(b)
        return logits

    def decode(self, sequence, logits, noise):
        """Draws a token for each row of noise; returns them and the logits they came from."""
        rows, tokens = [], []
        for row in noise:
            rows.append(logits)
            tokens.append(int((logits.float().cpu() + row).argmax()))
            sequence.tokens.append(tokens[-1])
            n = len(sequence.tokens)
            logits = self.step(sequence, n - 1, n)
            sequence.slide(n)
        return tokens, torch.stack(rows)

    def alone(self, prompt, noise, resume=None, one_step=False):
        """The run without offload.

        resume is for a prompt that another run resumes inside a step of this one: the rest
        is computed once more from there, as an engine does whose own cache has all of a
        prompt and which needs the logits of its last token.
        """
        s = Sequence(self, prompt)
        try:
            if one_step:
                logits = self.step(s, 0, len(prompt))
            else:
                logits = None
                for a, b in self.steps(0, len(prompt)):
                    logits = self.step(s, a, b)
                if resume is not None and resume not in [a for a, _ in self.steps(0, len(prompt))]:
                    for a, b in self.steps(resume, len(prompt)):
                        logits = self.step(s, a, b)
            s.slide(len(prompt))
            return self.decode(s, logits, noise)
        finally:
            s.close()

    # With the daemon: the producer's side.

    def produce(self, request, stop_after=None):
        """Prefills a prompt and stores it step by step; stops early after so many steps."""
        s = Sequence(self, request["prompt"])
        try:
            if not self.client:
                raise Gone("no daemon")
            return self._prefill_and_store(s, request, stop_after)
        except (Refused, Gone) as err:
            if self.client and isinstance(err, Gone):
                self.leave()
            else:
                s.close()
            s = Sequence(self, request["prompt"])
            self.prefill(s, 0)
            s.close()
            return {"computed": len(s.tokens), "aborted": False, "reason": str(err)}

    def _prefill_and_store(self, s, request, stop_after):
        fields = begin_fields(request, self.deployment["hash_tokens"])
        self.client.begin(role=pb.PRODUCER, **fields)
        done, last, abort = 0, None, True
        try:
            for i, (a, b) in enumerate(self.steps(0, len(s.tokens))):
                if i == stop_after:
                    break
                self.step(s, a, b)
                job = self.client.store(
                    request_id=request["id"], computed_tokens=b, blocks=s.untold(), event=self.ready()
                )
                # While this step is copied the next one runs. Only what the step before
                # has left behind may go now.
                if last:
                    self._stored(s, *last)
                done, last = b, (job, b)
            if last:
                self._stored(s, *last)
            abort = done < len(s.tokens)
        finally:
            self.client.finish(request["id"], abort=abort, computed_tokens=done)
        s.close()
        return {"computed": done, "aborted": abort, "reason": ""}

    def _stored(self, s, job, computed):
        event = self.client.wait(job)
        if not event.ok:  # it is not stored; the consumer will hear so
            print(f"store of {computed} tokens: {event.error}", file=sys.stderr)
        s.slide(computed)

    # The consumer's side.

    def consume(self, request, noise, spoil=False):
        """Pulls what it can of a prompt, computes the rest, and decodes."""
        s = Sequence(self, request["prompt"])
        out = {"resume": 0, "planned": 0, "reason": "no daemon", "demand": {}, "loaded": {}, "failures": []}
        pull = None
        if self.client and not self.client.gone:
            fields = begin_fields(request, self.deployment["hash_tokens"])
            pull = self.client.pull(
                lambda demand, fallback: self._destinations(s, [*demand, *fallback]), self.ready, **fields
            )
            out.update(resume=pull.resume_tokens, planned=pull.planned_tokens, reason=pull.reason)
            out.update(demand=chunks(pull.demand), loaded=chunks(pull.loaded))
            out["failures"] = [[f.group, f.chunk, f.cause, f.detail] for f in pull.failures]
            if not self.client.gone:
                self._keep_loaded(s, pull)
        if self.client and self.client.gone:  # also when it went in the middle of the pull
            self.leave()
            s = Sequence(self, request["prompt"])
            out.update(resume=0, loaded={}, reason=out["reason"] or "the daemon is gone")
        self.computed = 0
        if spoil:
            out["spoiled"] = self._spoil(s, out["resume"], pull.loaded)
            self.computed = 0
        logits = self.prefill(s, out["resume"])
        out["computed"] = self.computed
        tokens, rows = self.decode(s, logits, noise)
        s.close()
        if pull and pull.live and self.client:
            try:
                out["groups"] = counts(self.client.finish(request["id"]))
            except (Refused, Gone) as err:
                out["reason"] = out["reason"] or f"finish: {err}"
        out.update(tokens=tokens, logits=pack(rows))
        return out

    def _destinations(self, s, groups):
        """Blocks for what the plan names, full of NaN until the load."""
        runs = []
        for name, firsts in blocks_of(groups, self.chunk_blocks).items():
            for b in firsts:
                runs.append(pb.BlockRun(group=name, first_block=b, ids=s.room(name, b, b + self.chunk_blocks[name])))
        return runs

    def _keep_loaded(self, s, pull):
        """Gives back the blocks of chunks that did not come, unless they might still."""
        if pull.late:
            s.tables = {name: [] for name in s.tables}  # they are lost until the engine attaches anew
            return
        there = blocks_of(pull.loaded, self.chunk_blocks)
        for name, table in s.tables.items():
            keep = {b + i for b in there.get(name, ()) for i in range(self.chunk_blocks[name])}
            s.drop(name, [b for b in range(len(table)) if b not in keep])

    def _spoil(self, s, resume, loaded):
        """Zeroes each loaded chunk in turn: what it changes in the logits of the last token."""
        right, out = self._last_logits(s, resume), []
        for name, firsts in blocks_of(loaded, self.chunk_blocks).items():
            pool = self.pools[name]
            for b in firsts:
                ids = s.tables[name][b : b + self.chunk_blocks[name]]
                kept = pool.copy(ids)
                pool.fill(ids, 0.0)
                wrong = self._last_logits(s, resume)
                pool.paste(ids, kept)
                out.append([name, b // self.chunk_blocks[name], float((wrong - right).abs().max())])
        return out

    def _last_logits(self, s, resume):
        for a, b in self.steps(resume, len(s.tokens)):
            logits = self.step(s, a, b)
        return logits.float()


def begin_fields(request, hash_tokens):
    return {
        "request_id": request["id"],
        "transfer_id": request["id"],
        "tenant_salt": TENANT,
        "prompt_tokens": len(request["prompt"]),
        "hashes": prefix_hashes(request["prompt"], hash_tokens),
        "leg": pb.Leg.Value(request["leg"].upper()),
        "peer_id": request["peer"],
        "deadline_ms": request.get("deadline_ms", 0),
    }


def chunks(groups):
    return {g.group: [c for r in g.chunks for c in range(r.first, r.last + 1)] for g in groups}


def counts(reply):
    fields = ("demanded", "supplied", "transferred", "unmatched", "bytes")
    return {g.group: {f: getattr(g, f) for f in fields} for g in reply.groups}


def gumbel(seed, rows, vocabulary):
    """Noise that turns the largest of its sum with the logits into a draw by their softmax."""
    draw = torch.Generator().manual_seed(seed)
    return -torch.log(torch.empty(rows, vocabulary).exponential_(generator=draw))


def pack(t):
    t = t.contiguous().cpu()
    return {
        "dtype": str(t.dtype),
        "shape": list(t.shape),
        "bytes": base64.b64encode(t.view(torch.uint8).numpy().tobytes()).decode(),
    }


def unpack(p):
    flat = torch.frombuffer(
        bytearray(base64.b64decode(p["bytes"])), dtype=getattr(torch, p["dtype"].removeprefix("torch."))
    )
    return flat.view(p["shape"])


def serve(engine, attach, say):
    for line in sys.stdin:
        request = json.loads(line)
        if engine.client and "call_timeout_s" in request:
            engine.client.call_timeout = request["call_timeout_s"]
        if request["do"] == "produce":
            say(engine.produce(request, request.get("stop_after")))
        elif request["do"] == "patience":
            say({})
        elif request["do"] == "attach":
            attach()
        elif request["do"] == "consume":
            noise = gumbel(request["seed"], request["decode"], engine.config.vocab_size)
            say(engine.consume(request, noise, request.get("spoil", False)))
        else:
            raise ValueError(f"nothing to do is called {request['do']}")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--name", required=True)
    p.add_argument("--socket", required=True)
    p.add_argument("--deployment", required=True)
    p.add_argument("--device", default="cpu")
    p.add_argument("--memory", default="file", choices=("file", "file-layers", "ipc", "torch"))
    p.add_argument("--blocks", required=True, type=json.loads)
    a = p.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer

    def say(answer):
        answers.write(json.dumps(answer) + "\n")

    with open(a.deployment) as f:
        engine = Engine(f.read(), a.device, a.blocks)

    def attach():
        reply = engine.attach(a.name, a.socket, a.memory)
        say(
            {
                "node_id": reply.node_id,
                "verdict": reply.verdict,
                "torch": torch.__version__,
                "device": reply.device.name,
                "uuid": reply.device.uuid,
            }
        )

    attach()
    serve(engine, attach, say)
    if engine.client:
        engine.leave()


if __name__ == "__main__":
    main()
