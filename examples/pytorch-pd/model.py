"""A small hybrid transformer with random weights: Gemma 3's text model, made tiny.

Sliding-window and full layers take turns. The arithmetic is written out here, because an
engine's attention reads K and V out of blocks that it manages itself, while the model in
Hugging Face transformers keeps a cache of its own, whose interface changes from release to
release. The weights have that model's names, so reference() can load the same ones into
Gemma3ForCausalLM: pair.py holds this arithmetic against it, without cache or blocks.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 72
    layer_types: tuple = field(default=(SLIDING, FULL) * 3)
    norm_eps: float = 1e-6
    rope_theta: dict = field(default_factory=lambda: {SLIDING: 10_000.0, FULL: 1_000_000.0})


def random_weights(c, seed):
    """Weights by their names in Hugging Face's model, in fp32 on the CPU.

    They are larger than those that training begins with: of those, attention would be
    nearly uniform, and a missing chunk would hardly show.
    """
    draw = torch.Generator().manual_seed(seed)

    def matrix(out, into):
        return torch.randn(out, into, generator=draw) / math.sqrt(into)

    def norm(n):
        return 0.1 * torch.randn(n, generator=draw)

    w = {"model.embed_tokens.weight": matrix(c.vocab_size, c.hidden_size) / 2}
    for i in range(len(c.layer_types)):
        at = f"model.layers.{i}."
        w[at + "self_attn.q_proj.weight"] = matrix(c.heads * c.head_dim, c.hidden_size)
        w[at + "self_attn.k_proj.weight"] = matrix(c.kv_heads * c.head_dim, c.hidden_size)
        w[at + "self_attn.v_proj.weight"] = matrix(c.kv_heads * c.head_dim, c.hidden_size)
        w[at + "self_attn.o_proj.weight"] = matrix(c.hidden_size, c.heads * c.head_dim)
        w[at + "self_attn.q_norm.weight"] = norm(c.head_dim)
        w[at + "self_attn.k_norm.weight"] = norm(c.head_dim)
        w[at + "mlp.gate_proj.weight"] = matrix(c.intermediate_size, c.hidden_size)
        w[at + "mlp.up_proj.weight"] = matrix(c.intermediate_size, c.hidden_size)
        w[at + "mlp.down_proj.weight"] = matrix(c.hidden_size, c.intermediate_size)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            w[at + name + ".weight"] = norm(c.hidden_size)
    w["model.norm.weight"] = norm(c.hidden_size)
    return w


class Model:
    """The arithmetic. K and V of the past come from, and go to, a cache of the caller."""

    def __init__(self, config, weights, device, dtype):
        self.config, self.device, self.dtype = config, device, dtype
        self.w = {name: w.to(device, dtype) for name, w in weights.items()}
        self.inverse = {
            kind: 1.0
            / theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim)
            for kind, theta in config.rope_theta.items()
        }
        self.scale = torch.tensor(config.hidden_size**0.5, device=device).to(dtype)

    @torch.inference_mode()
    def step(self, tokens, start, cache):
        """Computes tokens at positions start, start+1, ... and returns the last one's logits.

        cache.put(layer, k, v) keeps [n, kv_heads, head_dim] of these positions, and
        cache.get(layer) returns (lo, k, v) of the positions from lo up to the last of
        them, lo being the first that attention reads.
        """
        c, n = self.config, len(tokens)
        x = F.embedding(torch.tensor(tokens, device=self.device), self.w["model.embed_tokens.weight"]) * self.scale
        at = torch.arange(start, start + n, device=self.device)
        turn = {kind: self._angles(kind, at) for kind in self.inverse}
        for i, kind in enumerate(c.layer_types):
            p = f"model.layers.{i}."
            h = self._norm(x, p + "input_layernorm.weight")
            h = self._attention(i, kind, h, at, turn[kind], cache)
            x = x + self._norm(h, p + "post_attention_layernorm.weight")
            h = self._norm(x, p + "pre_feedforward_layernorm.weight")
            gate = F.gelu(self._linear(h, p + "mlp.gate_proj.weight"), approximate="tanh")
            h = self._linear(gate * self._linear(h, p + "mlp.up_proj.weight"), p + "mlp.down_proj.weight")
            x = x + self._norm(h, p + "post_feedforward_layernorm.weight")
        last = self._norm(x[-1:], "model.norm.weight")
        return self._linear(last, "model.embed_tokens.weight")[0]

    def _attention(self, i, kind, x, at, turn, cache):
        c, n, p = self.config, len(x), f"model.layers.{i}.self_attn."
        q = self._linear(x, p + "q_proj.weight").view(n, c.heads, c.head_dim)
        k = self._linear(x, p + "k_proj.weight").view(n, c.kv_heads, c.head_dim)
        v = self._linear(x, p + "v_proj.weight").view(n, c.kv_heads, c.head_dim)
        q = self._rotate(self._norm(q, p + "q_norm.weight"), turn)
        k = self._rotate(self._norm(k, p + "k_norm.weight"), turn)
        cache.put(i, k, v)
        lo, k, v = cache.get(i)
        # [heads, queries, keys]; one KV head serves heads/kv_heads of them
        q = q.transpose(0, 1)
        k = k.transpose(0, 1).repeat_interleave(c.heads // c.kv_heads, 0)
        v = v.transpose(0, 1).repeat_interleave(c.heads // c.kv_heads, 0)
        scores = torch.matmul(q, k.transpose(1, 2)) * c.head_dim**-0.5
        back = at[:, None] - torch.arange(lo, lo + k.shape[1], device=self.device)[None, :]
        seen = (back >= 0) if kind == FULL else (back >= 0) & (back < c.window)
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(self.dtype)
        out = torch.matmul(weights, v).transpose(0, 1).reshape(n, c.heads * c.head_dim)
        return self._linear(out, p + "o_proj.weight")

    def _linear(self, x, name):
        return F.linear(x, self.w[name])

    def _norm(self, x, name):
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return (f * (1.0 + self.w[name].float())).to(self.dtype)

    def _angles(self, kind, at):
        half = at[:, None].float() * self.inverse[kind][None, :]
        both = torch.cat((half, half), -1)[:, None, :]
        return both.cos().to(self.dtype), both.sin().to(self.dtype)

    def _rotate(self, x, turn):
        cos, sin = turn
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin


def reference(config, weights, device, dtype):
    """Hugging Face's Gemma 3 with these weights: a function from tokens to their logits."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    c = config
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=len(c.layer_types),
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            query_pre_attn_scalar=c.head_dim,
            sliding_window=c.window,
            layer_types=list(c.layer_types),
            rms_norm_eps=c.norm_eps,
            attn_implementation="eager",
        )
    )
    # Its rotary angles and its scale of the embedding are not weights: they stay fp32.
    missing, unknown = model.load_state_dict(weights, strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"Gemma3ForCausalLM has other weights: missing {missing}, unknown {unknown}")
    model = model.to(device, dtype).eval()
    model.tie_weights()

    @torch.inference_mode()
    def logits(tokens):
        return model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0]

    return logits
