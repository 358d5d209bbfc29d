"""Runs cases of the Hopper forward kernel in JAX's interpreter: `python -m tests.kernels.flash_attention.interpreted`.

In a process of its own: the interpreter blocks one thread per warpgroup, and XLA sizes its pool by NPROC when it
starts.
"""

import dataclasses
import json
import sys
from typing import Any

import numpy as np

from tests.kernels.flash_attention.cases import Case, coin, ends, segments, truth


def ids(*values, side="q"):
    """Segment ids of runs of 16 places."""
    length = "q_len" if side == "q" else "kv_len"
    return lambda rng, case: np.resize(np.repeat(values, 16), (case.batch, getattr(case, length)))


def tiles(rng, case):
    """Tiles of 64 that are hidden, seen or mixed."""
    share = np.array([[0.0, 1.0, 0.5], [1.0, 0.5, 0.0]]).repeat(64, axis=0).repeat(64, axis=1)
    return rng.random((case.batch, 1, case.q_len, case.kv_len)) < share[: case.q_len, : case.kv_len]


def case(name, q_len, kv_len, head_dim, **more):
    make = {key: more.pop(key) for key in list(more) if key not in Case.__dataclass_fields__}
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1} | more
    return Case(name, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype="bfloat16", make=make, **sizes)


PACKED = {"q_segment_ids": ids(0, 0, 1, 2, 2, 2, 3), "kv_segment_ids": ids(0, 0, 1, 2, 2, 2, 3, side="kv")}
CASES = {
    each.name: each
    for each in (
        case("192 and 128", 72, 128, 192, value_dim=128, causal=True),
        case("96", 128, 72, 96, causal="lower_right"),
        case("72 and 40, odd lengths", 133, 77, 72, value_dim=40, sliding_window=(30, 5)),
        case("odd lengths, soft cap", 197, 65, 64, kv_heads=2, logits_soft_cap=5.0),
        case("one query", 1, 100, 128),
        case("packed", 200, 200, 64, cum_seqlens_q=ends(0, 50, 60, 170), causal=True),
        case("segments, sorted", 200, 140, 64, causal=True, **PACKED),
        case(
            "segments in no order",
            130,
            192,
            80,
            batch=2,
            sliding_window=(70, 9),
            q_segment_ids=segments("q", order="mixed"),
            kv_segment_ids=segments("kv", order="mixed"),
        ),
        case("segments that meet nothing", 130, 130, 64, q_segment_ids=ids(1, 5), kv_segment_ids=ids(1, 2, side="kv")),
        case("mask", 128, 192, 64, attention_mask=tiles),
        case("mask of one batch, odd lengths", 101, 150, 128, batch=2, attention_mask=coin(1, 1, "q", "k")),
        case("mask of keys", 100, 200, 64, batch=2, attention_mask=coin("b", 1, 1, "k"), causal=True),
        case("mask of queries", 130, 70, 64, attention_mask=coin("b", 1, "q", 1)),
        case("mask and segments", 128, 128, 64, attention_mask=coin("b", 1, "q", "k", share=0.9), **PACKED),
    )
}


def error(case) -> float:
    """The largest error of the output, as a part of its largest element; nan if not all of it is finite."""
    from ejkernel.kernels.flash_attention import config, mosaic
    from ejkernel.kernels.flash_attention.arguments import canonical

    plgpu: Any = mosaic.plgpu  # JAX 0.10 has no interpreter in it.
    mosaic.SMS = 3  # So that a block has several tiles.
    args, kwargs = case.arrays()
    (q, k, v), extras, rules = canonical(*args, **kwargs)
    guess = config.default_forward(q.shape[3], v.shape[3], packed=extras != type(extras)(), q_len=q.shape[1])
    # Tiles as small as they come, and the memory and registers that the guess uses.
    params = dataclasses.replace(guess, consumers=2, block_kv=64, stages=2, ping_pong=True, cluster=1)
    out, lse, rest = mosaic.flash_attention_forward(
        *(q, k, v),
        scale=rules.scale,
        lower=rules.lower,
        upper=rules.upper,
        soft_cap=rules.soft_cap,
        q_segment_ids=extras.q_segment_ids,
        kv_segment_ids=extras.kv_segment_ids,
        mask=extras.mask,
        cfg=params,
        interpret=plgpu.InterpretGPUParams(),
    )
    want = np.asarray(truth(args, kwargs)["out"])
    # A row that sees nothing is zeros, with a log-sum-exp of +inf.
    empty = np.all(want == 0, axis=3, keepdims=True)[..., 0].swapaxes(1, 2)
    if not (np.isinf(lse) == empty).all() or not np.isfinite(rest).all():
        return float("nan")
    return float(np.abs(np.asarray(out, np.float64) - want).max() / np.abs(want).max())


if __name__ == "__main__":
    print(json.dumps({name: error(CASES[name]) for name in sys.argv[1:]}))
