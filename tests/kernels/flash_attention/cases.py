"""One table of calls that every implementation of flash attention must get right, or refuse."""

from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.kernels import contract
from tests.kernels.flash_attention import oracle


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    batch: int = 2
    q_len: int = 40
    kv_len: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    dtype: str = "float32"
    make: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments; a function is called with a NumPy generator and the case."""
    tolerance: float | None = None

    def arrays(self, seed=0):
        """(query, key, value, bias, softmax_aux) and the keyword arguments."""
        rng = np.random.default_rng(seed)
        shape = lambda length, heads, dim: (self.batch, length, heads, dim)
        value_dim = self.value_dim or self.head_dim
        q = rng.normal(size=shape(self.q_len, self.heads, self.head_dim))
        k = rng.normal(size=shape(self.kv_len, self.kv_heads, self.head_dim))
        v = rng.normal(size=shape(self.kv_len, self.kv_heads, value_dim))
        kwargs = {name: x(rng, self) if callable(x) else x for name, x in self.make.items()}
        floats = [q, k, v, kwargs.pop("bias", None), kwargs.pop("softmax_aux", None)]
        return [None if x is None else jnp.asarray(x, self.dtype) for x in floats], kwargs

    @property
    def limit(self):
        return self.tolerance or contract.LIMITS[self.dtype]


def normal(*shape):
    """An array with axes named `b`, `h`, `q`, `k` or of a fixed size."""

    def make(rng, case):
        names = {"b": case.batch, "h": case.heads, "q": case.q_len, "k": case.kv_len}
        return rng.normal(size=[names.get(n, n) for n in shape])

    return make


def coin(*shape, share=0.6):
    return lambda rng, case: jnp.asarray(normal(*shape)(rng, case) < share)


def blocks(*shape, size=16, share=0.4):
    """A mask of squares, most of them False."""

    def make(rng, case):
        names = {"b": case.batch, "h": case.heads, "q": -(-case.q_len // size), "k": -(-case.kv_len // size)}
        chosen = rng.random([names.get(n, n) for n in shape]) < share
        return jnp.asarray(chosen.repeat(size, axis=-2).repeat(size, axis=-1)[..., : case.q_len, : case.kv_len])

    return make


def segments(side, count=3, order="sorted"):
    def make(rng, case):
        length = case.q_len if side == "q" else case.kv_len
        ids = rng.integers(0, count, size=(case.batch, length))
        return jnp.asarray(np.sort(ids, axis=1) if order == "sorted" else ids, jnp.int32)

    return make


def ends(*values):
    return lambda rng, case: jnp.asarray(values, jnp.int32)


FEATURES = [
    Case("plain"),
    Case("causal", make={"causal": True}),
    Case("causal, fewer queries", q_len=24, kv_len=56, make={"causal": True}),
    Case("causal, more queries", q_len=56, kv_len=24, make={"causal": True}),
    Case("lower right, fewer queries", q_len=24, kv_len=56, make={"causal": "lower_right"}),
    Case("lower right, more queries", q_len=56, kv_len=24, make={"causal": "lower_right"}),
    Case("one query", q_len=1, kv_len=40, make={"causal": "lower_right"}),
    Case("window", make={"sliding_window": (5, 9)}),
    Case("window, one number", make={"sliding_window": 7}),
    Case("window, causal", make={"sliding_window": 6, "causal": True}),
    Case("window to the left only", make={"sliding_window": (6, None)}),
    Case("window that leaves rows empty", q_len=56, kv_len=20, make={"sliding_window": (4, 4)}),
    Case("soft cap", make={"logits_soft_cap": 1.5}),
    Case("scale", make={"softmax_scale": 0.5, "causal": True}),
    Case("one key head", heads=4, kv_heads=1, make={"causal": True}),
    Case("as many key heads", heads=3, kv_heads=3),
    Case("head dim 80", head_dim=80, make={"causal": True}),
    Case("head dim 256", head_dim=256, heads=2, kv_heads=1, make={"causal": True}),
    Case("value dim smaller", head_dim=48, value_dim=32, make={"causal": True}),
    Case("value dim larger", head_dim=32, value_dim=72),
    Case("odd lengths", q_len=37, kv_len=53, make={"causal": True}),
    Case("bias", make={"bias": normal("b", "h", "q", "k")}),
    Case("bias of all heads", make={"bias": normal("b", 1, "q", "k"), "causal": True}),
    Case("bias of a key", make={"bias": normal("h", 1, "k")}),
    Case("bias of a query", kv_len=37, make={"bias": normal("b", 1, "q", 1)}),
    Case("mask", make={"attention_mask": coin("b", 1, "q", "k")}),
    Case("mask of squares", q_len=72, kv_len=60, make={"attention_mask": blocks("b", "h", "q", "k")}),
    Case("mask of keys", make={"attention_mask": coin("b", 1, 1, "k"), "causal": True}),
    Case("mask that hides all", make={"attention_mask": coin("b", "h", "q", 1)}),
    Case("segments", make={"q_segment_ids": segments("q"), "kv_segment_ids": segments("kv")}),
    Case("segments, causal", make={"q_segment_ids": segments("q"), "causal": True}),
    Case("packed", make={"cum_seqlens_q": ends(0, 9, 20, 33), "causal": True}),
    Case(
        "packed, other keys",
        kv_len=56,
        make={"cum_seqlens_q": ends(0, 9, 20, 33), "cum_seqlens_k": ends(0, 21, 25, 50), "causal": "lower_right"},
    ),
    Case("segments, mixed", make={"q_segment_ids": segments("q", order="mixed"), "sliding_window": (20, 3)}),
    Case("sinks", make={"softmax_aux": normal("h"), "causal": True}),
    Case("many sinks", make={"softmax_aux": normal("h", 3), "attention_mask": coin("b", 1, "q", 1)}),
    Case("dropout", make={"dropout_prob": 0.3, "dropout_seed": 11, "causal": True}),
    Case("not normalised", make={"normalize_output": False, "causal": True}, tolerance=1e-4),
    Case("rounded logits", make={"logits_dtype": "bfloat16"}, tolerance=2e-2),
    Case("precision", make={"precision": "highest"}),
    Case(
        "everything",
        q_len=37,
        kv_len=53,
        head_dim=40,
        value_dim=24,
        make={
            "bias": normal("b", 1, "q", "k"),
            "attention_mask": coin("b", 1, "q", "k"),
            "softmax_aux": normal("h"),
            "q_segment_ids": segments("q", 2),
            "kv_segment_ids": segments("kv", 2),
            "logits_soft_cap": 3.0,
            "sliding_window": (30, 4),
            "dropout_prob": 0.2,
            "dropout_seed": 5,
        },
    ),
]
DTYPES = [
    Case(f"{what} {dtype}", dtype=dtype, make=make, head_dim=64)
    for dtype in ("bfloat16", "float16")
    for what, make in (("plain", {}), ("causal", {"causal": True}))
]
CASES = [*FEATURES, *DTYPES]


# --- Pairs of features ---


def pairwise(factors):
    """Rows that have a value of every factor, such that every two values of two factors meet in one of them."""
    values = {name: [(name, i) for i in range(len(choices))] for name, choices in factors.items()}
    missing = {frozenset(pair) for a, b in combinations(values, 2) for pair in product(values[a], values[b])}
    gain = lambda row: len(missing & set(map(frozenset, combinations(row, 2))))
    rows = []
    while missing:
        row = []
        # The values that are in most missing pairs come first, then those that make most pairs with them.
        for name in sorted(values, key=lambda name: -sum(name in dict(pair) for pair in missing)):
            row.append(max(values[name], key=lambda value, row=row: (gain([*row, value]), _uses(value, missing))))
        missing -= set(map(frozenset, combinations(row, 2)))
        rows.append({name: factors[name][i] for name, i in row})
    return rows


def _uses(value, pairs):
    return sum(value in pair for pair in pairs)


def large_sink(rng, case):
    """exp(200) is no float32."""
    return np.append(rng.normal(size=case.heads - 1), 200.0)


_COMMON = {
    "lengths": [(24, 24), (21, 37), (37, 21), (1, 24), (4, 3)],
    "causal": [False, True, "lower_right"],
    "softmax_aux": [None, normal("h"), large_sink],
    "logits_soft_cap": [None, 1.5],
    "dropout_prob": [None, 0.3],
}
_KERNELS = {
    **_COMMON,
    "platform": ["xla", "triton", "pallas"],
    "sliding_window": [None, (5, None), (2, 9)],
    "heads": [(4, 2), (3, 3), (2, 1)],
    "dims": [(32, 32), (24, 40), (80, 16)],
    "ids": [None, "mixed", "packed"],
    "bias": [None, normal("b", 1, "q", "k"), normal("h", 1, "k")],
    "attention_mask": [None, coin("b", 1, 1, "k"), blocks("b", "h", "q", "k"), coin("b", 1, "q", 1)],
    "softmax_scale": [None, 0.5],
    "dtype": ["float32", "bfloat16", "float16"],
}
_ARRAYS = {
    "platform": ["xla", "reference"],
    "lengths": [(21, 37), (4, 3)],
    "causal": [False, True, "lower_right"],
    "softmax_aux": [None, large_sink],
    "bias": [None, normal("b", "h", "q", "k"), normal("b", 1, "q", 1)],
    "attention_mask": [None, coin("b", "h", "q", 1)],
    "ids": [None, "packed"],
    "dropout_prob": [None, 0.3],
    "normalize_output": [None, False],
}
"""What only these two serve."""


def _pair(number, *, platform, lengths, ids=None, heads=(4, 2), dims=(16, 16), dtype="float32", **make):
    """A row of pairs as a case, and who is to serve it."""
    make = {name: x for name, x in make.items() if x is not None}
    if "dropout_prob" in make:
        make["dropout_seed"] = 11
    if ids == "packed":
        make |= {"cum_seqlens_q": _ends("q_len"), "cum_seqlens_k": _ends("kv_len")}
    elif ids is not None:
        make |= {"q_segment_ids": segments("q", order=ids), "kv_segment_ids": segments("kv", order=ids)}
    # TPUs have no float16.
    dtype = "bfloat16" if platform == "pallas" and dtype == "float16" else dtype
    tolerance = 1e-4 if "normalize_output" in make else None
    shape = {"q_len": lengths[0], "kv_len": lengths[1], "heads": heads[0], "kv_heads": heads[1]}
    case = Case(
        f"pairs {number}", **shape, head_dim=dims[0], value_dim=dims[1], dtype=dtype, make=make, tolerance=tolerance
    )
    return platform, case


def _ends(side):
    """Three sequences and what belongs to none, or as many as there is room for."""
    return lambda rng, case: jnp.asarray([0, *(min(n, getattr(case, side)) for n in (2, 9, 20))], jnp.int32)


PAIRS = [_pair(n, **row) for n, row in enumerate([*pairwise(_KERNELS), *pairwise(_ARRAYS)])]

_wide = partial(Case, batch=2, q_len=320, kv_len=320, heads=4, kv_heads=2, head_dim=128, dtype="bfloat16")
GPU_CASES = [
    _wide("wide plain"),
    _wide("wide causal", make={"causal": True}),
    _wide("wide float16", dtype="float16", make={"causal": True}),
    _wide("wide head dim 64", head_dim=64, make={"causal": True}),
    _wide("wide head dim 256", head_dim=256, make={"causal": True}),
    _wide("wide head dim 80", head_dim=80, make={"causal": True}),
    _wide("wide value dim 64", value_dim=64, make={"causal": True}),
    _wide("wide odd lengths", q_len=301, kv_len=333, make={"causal": True}),
    _wide("wide lower right", q_len=128, make={"causal": "lower_right"}),
    _wide("wide groups of 7", batch=15, heads=28, kv_heads=4, q_len=300, kv_len=300, make={"causal": True}),
    _wide("wide, tiles that are whole", q_len=512, kv_len=512, make={}),
    _wide("wide window", make={"causal": True, "sliding_window": 70}),
    _wide("wide window, both sides", make={"sliding_window": (40, 24)}),
    _wide("wide soft cap", make={"logits_soft_cap": 2.0, "causal": True}),
    _wide("wide segments", make={"q_segment_ids": segments("q"), "causal": True}),
    _wide("wide segments, mixed", make={"q_segment_ids": segments("q", order="mixed")}),
    _wide("wide packed", make={"cum_seqlens_q": ends(0, 70, 130, 131, 300), "causal": True, "sliding_window": 50}),
    _wide(
        "wide packed, other keys",
        kv_len=420,
        make={"cum_seqlens_q": ends(0, 70, 130, 300), "cum_seqlens_k": ends(0, 200, 210, 400), "causal": "lower_right"},
    ),
    _wide("wide mask", make={"attention_mask": blocks("b", 1, "q", "k")}),
    _wide("wide mask of heads", q_len=301, make={"attention_mask": coin("b", "h", "q", "k"), "causal": True}),
    _wide("wide mask of keys", make={"attention_mask": coin("b", 1, 1, "k")}),
    _wide("wide sinks", make={"softmax_aux": normal("h"), "causal": True}),
    _wide("wide dropout", make={"dropout_prob": 0.3, "dropout_seed": 11}),
    _wide("wide bias", make={"bias": normal("b", "h", "q", "k")}),
    _wide("wide bias of all heads", make={"bias": normal("b", 1, "q", "k"), "causal": True}),
    _wide("wide bias of a key", make={"bias": normal("h", 1, "k")}),
    _wide("wide float32", dtype="float32", make={"causal": True}, tolerance=1e-2),
]
"""For real GPUs: 16-bit arguments, tiles of usual sizes. Products of float32 are rounded there by default."""


_NAMES = ("query", "key", "value", "bias", "softmax_aux")
_WRITTEN = {"result 0": "out", **{f"gradient {i}": f"d{name}" for i, name in enumerate(_NAMES)}}


def attend(fn, args, kwargs):
    """Output and gradients of `fn(*args, **kwargs)`, by the names of the arguments."""
    return {_WRITTEN[name]: x for name, x in contract.outputs(fn, args, kwargs).items()}


def truth(args, kwargs):
    """What NumPy says in float64, rounded to what it is compared with only by the comparison."""
    return oracle.attend(args, kwargs, contract.cotangent)


# Gradients are sums of many rounded terms of size 1, which may cancel: an element is held to the size of its whole
# array, or to that of a term.
assert_close = partial(contract.assert_close, least=1.0)
