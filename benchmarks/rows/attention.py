"""Attention on a Hopper GPU: calls of what models train, forward and with the backward, beside cuDNN.

TFLOP/s count the pairs of queries and keys that see each other: 2 (head dim + value dim) operations each, 3.5 times
that with the backward. `32/8` are query and key heads, `192/128` head and value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.figures import Contender, Goal, Row
from benchmarks.ways import ways
from ejkernel.modules import FlashAttention
from ejkernel.ops.core.workload import Workload

BACKENDS = ("cudnn", "mosaic", "triton")


@dataclass(frozen=True)
class Call:
    """A call; `segments` are lengths of packed sequences, `window` how many keys before itself a query sees.

    `mask` is a boolean mask beside that: `triangle`, in place of causal, or `padding`, of no key. `bias` has a number
    for each of the `keys`, in float32, or for the `pairs` of a head, in bfloat16.
    """

    batch: int
    q_len: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    kv_len: int | None = None
    value_dim: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    segments: tuple[int, ...] = ()
    mask: str = ""
    bias: str = ""
    model: str = ""

    @property
    def keys(self) -> int:
        return self.kv_len or self.q_len

    @property
    def pairs(self) -> float:
        """Of a query and a key that it sees, for each head."""
        before = 0 if self.segments else self.keys - self.q_len
        seen = [np.arange(1, n + 1) + before for n in self.segments or (self.q_len,)]
        if not self.causal:
            return self.batch * sum(len(x) * int(x[-1]) for x in seen)
        return self.batch * sum(int((x if self.window is None else np.minimum(x, self.window + 1)).sum()) for x in seen)

    @property
    def kwargs(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.causal and self.mask != "triangle":
            found["causal"] = True if self.kv_len is None else "lower_right"
        if self.window is not None:
            found["sliding_window"] = (self.window, 0)
        if self.soft_cap is not None:
            found["logits_soft_cap"] = self.soft_cap
        return found

    def inputs(self, backward: bool = False) -> tuple[dict[str, Any], ...]:
        """Query, key and value, what goes beside them by keyword, and the gradient of the output."""
        value_dim = self.value_dim or self.dim
        queries, keys = (self.batch, self.q_len, self.heads), (self.batch, self.keys, self.kv_heads)
        shapes = {"q": (*queries, self.dim), "k": (*keys, self.dim), "v": (*keys, value_dim)}
        shapes |= {"dout": (*queries, value_dim)} if backward else {}
        seeds = jax.random.split(jax.random.key(17), 4)
        arrays = {
            name: jax.random.normal(seed, shape, jnp.bfloat16)
            for seed, (name, shape) in zip(seeds, shapes.items(), strict=False)
        }
        extra: dict[str, Any] = {}
        if self.segments:
            ids = jnp.asarray(np.repeat(np.arange(len(self.segments)), self.segments), jnp.int32)
            extra["q_segment_ids"] = jnp.broadcast_to(ids, (self.batch, self.q_len))
        if self.mask == "triangle":
            extra["attention_mask"] = jnp.tril(jnp.ones((1, 1, self.q_len, self.keys), bool))
        elif self.mask:
            extra["attention_mask"] = jnp.ones((self.batch, 1, 1, self.keys), bool)
        if self.bias == "keys":
            extra["bias"] = jax.random.normal(seeds[0], (self.batch, 1, 1, self.keys))
        elif self.bias:
            extra["bias"] = jax.random.normal(seeds[0], (1, self.heads, self.q_len, self.keys), jnp.bfloat16)
        return arrays, extra

    @property
    def workload(self) -> Workload:
        arrays, extra = jax.eval_shape(self.inputs)
        shapes = tuple((x.shape, x.dtype.name) for x in (arrays[name] for name in "qkv"))
        return Workload(name=str(self), device="gpu", shapes=shapes, kwargs=self.kwargs | extra)

    def small(self) -> Call:
        """One that takes a CPU no time."""
        segments = tuple(8 + i % len(set(self.segments)) for i, _ in enumerate(self.segments[:4]))
        return replace(
            self,
            batch=1,
            q_len=sum(segments) or 32,
            kv_len=self.kv_len and 64,
            heads=max(1, self.heads // self.kv_heads),
            kv_heads=1,
            segments=segments,
            window=self.window and 16,
        )

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = f"{self.dim}" if self.value_dim is None else f"{self.dim}/{self.value_dim}"
        length = f"{self.q_len}" if self.kv_len is None else f"{self.q_len} of {self.kv_len}"
        more = f", window {self.window}" if self.window else ""
        more += f", soft cap {self.soft_cap:g}" if self.soft_cap else ""
        more += f", {len(self.segments)} segments" if self.segments else ""
        more += f", mask: {self.mask}" if self.mask else ""
        more += f", bias of {self.bias}" if self.bias else ""
        shown = f"{self.batch} x {length} x {heads} x {dims}, {'causal' if self.causal else 'full'}{more}"
        return f"{self.model}: {shown}" if self.model else shown


# --- The calls ---


def uneven(count: int, total: int, seed: int) -> tuple[int, ...]:
    """`count` lengths with the sum `total`, from a few dozen up."""
    shares = np.random.default_rng(seed).dirichlet(np.full(count, 1.5))
    lengths = np.maximum((shares * total).astype(int), 32)
    lengths[lengths.argmax()] += total - lengths.sum()
    return tuple(map(int, lengths))


def _full(*sizes: int) -> Call:
    return Call(*sizes, causal=False)


CALLS: dict[str, tuple[Call, ...]] = {
    "first": (
        *(Call(4, 4096, 16, 16, 128), _full(4, 4096, 16, 16, 128), Call(1, 16384, 16, 16, 128)),
        *(Call(8, 2048, 32, 8, 64), Call(16, 1024, 16, 16, 128)),
        *(Call(2, 8192, 16, 16, 64), Call(2, 8192, 8, 8, 256)),
    ),
    "grouped": (
        *(Call(2, 4096, 32, 8, 128), Call(1, 8192, 64, 8, 128)),
        *(Call(4, 2048, 28, 4, 128), Call(1, 32768, 8, 8, 128)),
    ),
    "values": (Call(2, 4096, 16, 16, 192, value_dim=128),),
    "dims": (Call(4, 4096, 16, 16, 96), Call(4, 4096, 16, 16, 80)),
    "packed": (
        Call(1, 16384, 32, 8, 128, segments=(1024,) * 16),
        *(Call(1, 16384, 32, 8, 128, segments=uneven(n, 16384, seed)) for seed, n in enumerate((3, 10, 40))),
        Call(1, 16384, 32, 8, 64, segments=(1024,) * 16),
    ),
    "windows": (Call(2, 8192, 32, 8, 128, window=4095), Call(2, 8192, 32, 8, 128, window=511)),
    "cap": (Call(2, 4096, 8, 4, 256, soft_cap=50.0),),
    "short": (_full(32, 512, 12, 12, 64), _full(64, 256, 16, 16, 64), _full(64, 197, 16, 16, 64)),
    "few": (Call(1, 512, 32, 8, 128, kv_len=8192),),
    # What else the guess has a figure for (`kernels/flash_attention/rule.py`).
    "rule": (
        *(_full(32, 512, 16, 16, 128), _full(32, 256, 16, 16, 128), _full(16, 1024, 16, 16, 64)),
        *(Call(64, 256, 16, 16, 64), Call(32, 512, 16, 16, 64), Call(32, 512, 16, 16, 128)),
        *(_full(2, 8192, 8, 8, 256), _full(4, 2048, 8, 8, 256), Call(4, 2048, 8, 8, 256)),
        *(Call(4, 4096, 16, 16, 112), Call(4, 4096, 16, 16, 72), Call(4, 4096, 16, 16, 192)),
    ),
    "masks": (Call(4, 4096, 16, 16, 128, mask="triangle"), Call(4, 4096, 16, 16, 128, mask="padding")),
    "biases": tuple(Call(4, 4096, 16, 16, dim, bias=bias) for bias in ("keys", "pairs") for dim in (64, 128)),
}


class Model(NamedTuple):
    """The attention of a family of models, and the lengths it is trained with."""

    call: Call
    lengths: tuple[int, ...]
    packed: bool = False


def _model(name: str, heads: int, kv_heads: int, dim: int, *lengths: int, packed: bool = False, **fields: Any) -> Model:
    return Model(Call(1, 0, heads, kv_heads, dim, model=name, **fields), lengths, packed)


MODELS = (
    _model("Llama 8B", 32, 8, 128, 2048, 4096, 8192, packed=True),
    _model("Llama 70B", 64, 8, 128, 4096, 8192, packed=True),
    _model("Qwen 7B", 28, 4, 128, 2048, 4096, 32768, packed=True),
    _model("Qwen 30B, experts", 32, 4, 128, 4096, 8192, packed=True),
    _model("Mistral, window", 32, 8, 128, 8192, 16384, window=4096),
    _model("Gemma, soft cap", 16, 8, 256, 4096, 8192, soft_cap=50.0),
    _model("Gemma, window", 8, 4, 256, 8192, window=1024),
    _model("Phi", 32, 32, 96, 2048, 4096),
    _model("StableLM", 32, 32, 80, 4096),
    _model("GPT-2", 12, 12, 64, 1024),
    _model("small Llama", 9, 3, 64, 2048, 8192, packed=True),
    _model("Falcon", 71, 1, 64, 2048),
    _model("DeepSeek, latent", 16, 16, 192, 4096, value_dim=128),
    _model("BERT large", 16, 16, 64, 128, 384, 512, causal=False),
    _model("ViT large", 16, 16, 64, 197, 577, causal=False),
    _model("ViT huge", 16, 16, 80, 257, 729, causal=False),
    _model("Whisper", 20, 20, 64, 1500, causal=False),
    _model("diffusion transformer", 24, 24, 128, 1024, 4096, causal=False),
    _model("wide full attention", 16, 16, 256, 2048, causal=False),
)


def drawn(count: int = 30, seed: int = 17) -> list[Call]:
    """Calls of 4096 to 32 768 tokens, all different."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        model = MODELS[rng.integers(len(MODELS))]
        length = int(rng.choice(model.lengths))
        batch = max(1, int(rng.choice([4096, 8192, 16384, 32768])) // length)
        segments: tuple[int, ...] = ()
        if model.packed and rng.random() < 0.4:
            shares = rng.dirichlet(np.full(int(rng.integers(2, 25)), 2.0))
            ends = np.unique([0, *(np.cumsum(shares) * length).astype(int)[:-1], length])
            segments = tuple(map(int, np.diff(ends)))
        call = replace(model.call, batch=batch, q_len=length, segments=segments)
        found[str(call)] = call
    return list(found.values())


# --- What they are to reach ---


GOALS: dict[str, Callable[[bool], Goal]] = {
    "first": lambda backward: Goal(1.03 if backward else 1.07, ("cudnn",)),
    "grouped": lambda backward: Goal(1.05 if backward else 1.10, ("cudnn",)),
    "values": lambda backward: Goal(450 if backward else 580, what="rate"),
    "dims": lambda backward: Goal(1.00 if backward else 1.05, ("cudnn",)),
    "packed": lambda backward: Goal(1 / 1.25 if backward else 1 / 1.2, ("as a batch",)),
    "windows": lambda backward: Goal(1.08 if backward else 1.10, ("cudnn",)),
    "cap": lambda backward: Goal(1 / 1.10 if backward else 1 / 1.08, ("no cap",)),
    "short": lambda backward: Goal(1.00, ("cudnn",)),
    "few": lambda backward: Goal(1.05, ("cudnn", "triton")),
    "rule": lambda backward: Goal(0.97, BACKENDS),
    "biases": lambda backward: Goal(0.97, BACKENDS),
    "drawn": lambda backward: Goal(0.97, BACKENDS),
}


def rows(kind: str, dry: bool) -> list[Row]:
    """Of one kind of `CALLS`, or `drawn`."""
    calls = drawn() if kind == "drawn" else CALLS[kind]
    calls = [call.small() for call in calls] if dry else calls
    passes = (False,) if kind == "few" else (False, True)
    return [_row(kind, call, backward, dry) for call in calls for backward in passes]


def _row(kind: str, call: Call, backward: bool, dry: bool) -> Row:
    found = ways(FlashAttention(), call.workload, BACKENDS, dry=dry)
    contenders = {name: Contender(_run(fn, call, backward)) for name, fn in found.items()}
    untuned = found["untuned"]
    if call.segments and kind == "packed":
        contenders["as a batch"] = _as_a_batch(untuned, call, backward)
    if call.soft_cap and kind == "cap":
        contenders["no cap"] = Contender(_run(untuned, replace(call, soft_cap=None), backward), same=False)
    return Row(
        table=f"Attention, {kind}, {'forward and backward' if backward else 'forward'}",
        name=str(call),
        inputs=partial(call.inputs, backward),
        contenders=contenders,
        goals=(GOALS[kind](backward),) if kind in GOALS else (),
        work=2 * (call.dim + (call.value_dim or call.dim)) * call.heads * call.pairs * (3.5 if backward else 1),
    )


def _run(fn: Callable[..., Any], call: Call, backward: bool) -> Callable[..., Any]:
    """The call as a function of its inputs, with its gradients if they are asked for."""

    def forward(arrays, extra):
        return fn(arrays["q"], arrays["k"], arrays["v"], **call.kwargs, **extra)

    def both(arrays, extra):
        dout = arrays["dout"]
        out, pull = jax.vjp(lambda *qkv: fn(*qkv, **call.kwargs, **extra), *(arrays[name] for name in "qkv"))
        return out, pull(dout)

    return both if backward else forward


def _as_a_batch(fn: Callable[..., Any], call: Call, backward: bool) -> Contender:
    """The same work as sequences of one length: the same ones, or as many with as many pairs."""
    count, mean = len(call.segments), float(np.mean(np.square(call.segments))) ** 0.5
    batch = replace(call, batch=count, q_len=round(mean / 8) * 8 or 8, segments=())
    run = _run(fn, batch, backward)
    if len(set(call.segments)) > 1:
        return Contender(run, after=lambda arrays, extra: batch.inputs(backward), same=False)

    def split(arrays, extra):
        cut = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[2:]), arrays)
        return jax.tree.map(lambda x, y: x.reshape(y.shape), run(cut, {}), _results(arrays, backward))

    return Contender(split)


def _results(arrays: dict[str, Any], backward: bool) -> Any:
    """Arrays that have the shapes of the results."""
    out = jnp.empty((*arrays["q"].shape[:3], arrays["v"].shape[3]))
    return (out, (arrays["q"], arrays["k"], arrays["v"])) if backward else out
