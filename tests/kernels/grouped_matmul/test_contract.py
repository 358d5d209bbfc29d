"""Every implementation that a CPU can run, against a float64 loop over the groups: all three passes."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.grouped_matmul import groups, pallas, reference, triton, xla
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS, draw_group_sizes

# JAX 0.12 warns that this dialect of Pallas will go; `docs/flash_attention.md` tells what that means for us.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

BACKENDS = {
    "xla": (xla, {"cfg": xla.XlaConfig(rows=16, least_rows=8)}),
    "triton": (triton, {"cfg": triton.TritonConfig(block_m=32, block_n=32, block_k=32), "interpret": True}),
    "pallas": (pallas, {"cfg": pallas.TpuConfig(block_m=32, block_k=128, block_n=128), "interpret": True}),
}
# Rows, K, N, first row, sizes.
CASES = {
    "uneven, with rows of no group on both sides": (100, 48, 40, 9, [13, 0, 40, 1, 17]),
    "one group has everything": (64, 32, 136, 0, [0, 64, 0]),
    "all groups are empty": (40, 16, 24, 5, [0, 0]),
    "a single row": (1, 8, 8, 0, [1]),
}
LIMITS = {"float32": 2e-6, "bfloat16": 4e-3}


def arrays(rows, k, n, first, sizes, dtype="float32", seed=0):
    """lhs, rhs, dout, with NaN in the rows of no group, and the same without."""
    rng = np.random.default_rng(seed)
    lhs, rhs, dout = (
        jnp.asarray(rng.standard_normal(s, np.float32), dtype) for s in ((rows, k), (len(sizes), k, n), (rows, n))
    )
    inside = np.zeros((rows, 1), bool)
    inside[first : first + sum(sizes)] = True
    poisoned = [jnp.where(inside, x, jnp.nan) for x in (lhs, dout)]
    return (poisoned[0], rhs, poisoned[1]), (lhs, rhs, dout)


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30)


def passes(module, given, sizes, first, **options):
    """The three passes, as one program."""

    @jax.jit
    def run(given, sizes, first):
        lhs, rhs, dout = given
        return (
            module.forward(lhs, rhs, sizes, first_row=first, **options),
            module.forward(dout, rhs, sizes, first_row=first, transpose_rhs=True, **options),
            module.drhs(lhs, dout, sizes, first_row=first, **options),
        )

    return run(given, sizes, first)


def expected(whole, sizes, first):
    lhs, rhs, dout = whole
    return (
        reference.forward(lhs, rhs, sizes, first_row=first),
        reference.forward(dout, rhs, sizes, first_row=first, transpose_rhs=True),
        reference.drhs(lhs, dout, sizes, first_row=first),
    )


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CASES), (next(iter(CASES)), "bfloat16")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_passes_match_a_float64_loop_and_touch_no_other_rows(backend, name, dtype):
    rows, k, n, first, sizes = CASES[name]
    module, options = BACKENDS[backend]
    given, whole = arrays(rows, k, n, first, sizes, dtype)
    got = passes(module, given, jnp.array(sizes, jnp.int32), jnp.int32(first), **options)
    for a, b in zip(got, expected(whole, sizes, first), strict=True):
        assert relative(a, b) < LIMITS[dtype]
        assert a.dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_may_be_wider_than_operands(backend):
    rows, k, n, first, sizes = CASES["uneven, with rows of no group on both sides"]
    module, options = BACKENDS[backend]
    given, whole = arrays(rows, k, n, first, sizes, "bfloat16")
    options = options | {"out_dtype": jnp.float32}
    got = passes(module, given, jnp.array(sizes, jnp.int32), jnp.int32(first), **options)
    assert all(relative(a, b) < 2e-6 for a, b in zip(got, expected(whole, sizes, first), strict=True))
    assert {a.dtype for a in got} == {jnp.dtype("float32")}


@functools.cache
def compiled_xla(pieces):
    return jax.jit(functools.partial(passes, xla, cfg=xla.XlaConfig(rows=pieces, least_rows=4)))


@hypothesis.given(
    st.lists(st.integers(0, 12), min_size=5, max_size=5),
    st.integers(0, 60),
    st.sampled_from([4, 16]),
    st.integers(0, 9),
)
@hypothesis.settings(max_examples=40)
def test_xla_is_right_for_any_sizes(sizes, first, pieces, seed):
    first = min(first, 60 - sum(sizes))
    given, whole = arrays(60, 8, 16, first, sizes, seed=seed)
    got = compiled_xla(pieces)(given, jnp.array(sizes, jnp.int32), jnp.int32(first))
    assert all(relative(a, b) < 2e-6 for a, b in zip(got, expected(whole, sizes, first), strict=True))


def test_offsets_select_groups_and_other_rows_keep_what_was_there():
    sizes = np.array([5, 11, 0, 20, 4], np.int32)
    _, (lhs, rhs, _) = arrays(44, 16, 8, 0, sizes.tolist())
    before = jnp.full((44, 8), 7.0)
    for offset in range(5):
        mine = rhs[offset : offset + 2]
        local = groups.local_groups(jnp.asarray(sizes), offset, mine.shape[0])
        call = lambda local, mine=mine: xla.forward(lhs, mine, local.sizes, first_row=local.first_row)
        got = groups.with_existing(call, local, 44, before)
        first = int(sizes[:offset].sum())
        want = reference.forward(lhs, mine, sizes[offset : offset + 2], first_row=first, existing_out=before)
        assert relative(got, want) < 2e-6


def test_memory_of_xla_does_not_grow_with_the_groups():
    rows, k, n, count = 256, 64, 96, 64
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, k), (count, k, n), (rows, n))]
    sizes = jax.ShapeDtypeStruct((count,), jnp.int32)
    used = jax.jit(lambda a, b, s: xla.forward(a, b, s)).lower(*specs[:2], sizes).compile().memory_analysis()
    assert used.temp_size_in_bytes <= 4 * rows * n * 4
    used = jax.jit(lambda a, d, s: xla.drhs(a, d, s)).lower(specs[0], specs[2], sizes).compile().memory_analysis()
    assert used.temp_size_in_bytes <= 4 * count * k * n * 4


@pytest.mark.parametrize("distribution", ["even", "uneven", "one-hot", "with empty groups"])
def test_drawn_sizes_add_up(distribution):
    sizes = draw_group_sizes(1000, 7, distribution, seed=3)
    assert sizes.sum() == 1000
    assert (sizes >= 0).all()
    assert sizes.dtype == np.int32
    assert (distribution == "with empty groups") <= bool((sizes[::2] == 0).all())


@pytest.mark.parametrize("name", WORKLOADS)
def test_spaces_hold_only_what_fits_and_start_with_a_guess(name):
    w = WORKLOADS[name]
    for cfgs in (triton.space(w.rows, w.groups, w.k, w.n), pallas.space(w.rows, w.groups, w.k, w.n)):
        assert cfgs
        assert len(set(cfgs)) == len(cfgs)
        assert all(cfg.unfit() is None for cfg in cfgs)
    assert all(cfg.unfit() is None for cfg in xla.space(w.rows, w.groups))
    assert "powers of two" in (xla.XlaConfig(rows=48).unfit() or "")
    assert "shared memory" in (triton.TritonConfig(block_k=256).unfit() or "")
    assert "fast memory" in (pallas.TpuConfig(block_k=4096, block_n=4096).unfit() or "")
