"""Every implementation that a CPU can run, against a float64 loop over the groups: all three passes."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.grouped_matmul import config, pallas, reference, tiles, triton, xla
from ejkernel.kernels.grouped_matmul.dimensions import Dimensions, product
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS, draw_group_sizes

# JAX 0.12 warns that this dialect of Pallas will go; `docs/flash_attention.md` tells what that means for us.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

BACKENDS = {
    "xla": (xla, {"cfg": xla.XlaConfig(rows=16, least_rows=8)}),
    "triton": (triton, {"cfg": tiles.TritonConfig(block_m=32, block_n=32, block_k=32), "interpret": True}),
    "pallas": (pallas, {"cfg": tiles.TpuConfig(block_m=32, block_k=128, block_n=128), "interpret": True}),
}
# Rows, K, N, first row, sizes: uneven, with rows of no group on both sides. Other cases are those of the operation.
CASE = (100, 48, 40, 9, [13, 0, 40, 1, 17])


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


@pytest.mark.thin(2)
@pytest.mark.parametrize(("dtype", "out_dtype"), [("float32", None), ("bfloat16", "float32")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_passes_match_a_float64_loop_and_touch_no_other_rows(backend, dtype, out_dtype):
    rows, k, n, first, sizes = CASE
    module, options = BACKENDS[backend]
    given, whole = arrays(rows, k, n, first, sizes, dtype)
    options = options | {"out_dtype": out_dtype}
    got = passes(module, given, jnp.array(sizes, jnp.int32), jnp.int32(first), **options)
    for a, b in zip(got, expected(whole, sizes, first), strict=True):
        assert relative(a, b) < 2e-6
        assert a.dtype == "float32"


def test_products_of_few_rows_on_tpus_match_a_float64_loop():
    module, options = BACKENDS["pallas"]
    sizes = [1, 0, 1]
    given, whole = arrays(3, 300, 40, 1, sizes)
    got = passes(module, given, jnp.array(sizes, jnp.int32), jnp.int32(1), **options)
    assert all(relative(a, b) < 2e-6 for a, b in zip(got, expected(whole, sizes, 1), strict=True))


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


def test_memory_of_xla_does_not_grow_with_the_groups():
    rows, k, n, count = 256, 64, 96, 64
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, k), (count, k, n), (rows, n))]
    sizes = jax.ShapeDtypeStruct((count,), jnp.int32)
    used = jax.jit(lambda a, b, s: xla.forward(a, b, s)).lower(*specs[:2], sizes).compile().memory_analysis()
    assert used.temp_size_in_bytes <= 4 * rows * n * 4
    used = jax.jit(lambda a, d, s: xla.drhs(a, d, s)).lower(specs[0], specs[2], sizes).compile().memory_analysis()
    assert used.temp_size_in_bytes <= 4 * count * k * n * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 8, 64, 512, 4096])
def test_memory_of_xla_is_four_results_or_a_mebibyte(rows, dtype):
    k, n, count = 256, 1024, 16
    lhs, rhs, dout = (jax.ShapeDtypeStruct(s, dtype) for s in ((rows, k), (count, k, n), (rows, n)))
    cfg = xla.XlaConfig(least_rows=128, steps=1)  # Few sizes: each is code to compile.
    calls = [(xla.forward, lhs, rhs), (functools.partial(xla.forward, transpose_rhs=True), dout, rhs)]
    for fn, *operands in [*calls, (xla.drhs, lhs, dout)]:
        call = jax.jit(functools.partial(fn, cfg=cfg)).lower(*operands, jax.ShapeDtypeStruct((count,), jnp.int32))
        out = call.out_info
        used = call.compile().memory_analysis().temp_size_in_bytes
        assert used <= max(4 * out.size * out.dtype.itemsize, 1 << 20)


PARTS = {
    "of weights": (40, 1000, 1100, [3, 0, 20, 1, 9], xla.XlaConfig(rows=8, least_rows=4)),
    "of a gradient, from whole pieces alone": (1040, 8, 1100, [512, 0, 512], xla.XlaConfig(least_rows=256, steps=1)),
}


@pytest.mark.parametrize("name", PARTS)
def test_xla_is_right_if_columns_are_taken_in_parts_that_overlap(name):
    rows, k, n, sizes, cfg = PARTS[name]
    given, whole = arrays(rows, k, n, 5, sizes)
    got = passes(xla, given, jnp.array(sizes, jnp.int32), jnp.int32(5), cfg=cfg)
    assert all(relative(a, b) < 2e-6 for a, b in zip(got, expected(whole, sizes, 5), strict=True))


@pytest.mark.parametrize("rows", [7, 32, 64])
@pytest.mark.parametrize("which", ["forward", "drhs"])
def test_xla_computes_a_piece_only_if_a_group_has_one_of_its_size(which, rows):
    """A loop's invariant code is moved out of it, and then runs for every group."""
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    shapes = {"forward": ((rows, 32), (2, 32, 48)), "drhs": ((rows, 32), (rows, 48))}[which]
    fn = functools.partial(getattr(xla, which), cfg=xla.XlaConfig(rows=32, least_rows=16))
    text = jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), sizes).compile().as_text()
    products = [part for part in text.split("\n\n") if " dot(" in part or "__ynn_fusion" in part]
    assert products
    assert not any(" while(" in part for part in products)


def test_pieces_of_xla_waste_few_rows():
    assert xla.XlaConfig(rows=64, least_rows=8, steps=2).sizes(1000) == [8, 16, 24, 32, 48, 64]
    assert xla.XlaConfig(rows=64, least_rows=32).sizes(50) == [32, 50]
    assert xla.XlaConfig(least_rows=32).sizes(7) == [7]


@pytest.mark.parametrize("distribution", ["even", "uneven", "one-hot", "with empty groups"])
def test_drawn_sizes_add_up(distribution):
    sizes = draw_group_sizes(1000, 7, distribution, seed=3)
    assert sizes.sum() == 1000
    assert (sizes >= 0).all()
    assert sizes.dtype == np.int32
    assert (distribution == "with empty groups") <= bool((sizes[::2] == 0).all())


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_spaces_hold_only_what_fits_and_start_with_a_guess(workload):
    lhs, rhs, sizes = workload.abstract()[0]
    dims = product(lhs, rhs)
    for cfgs in (tiles.triton_space(dims), tiles.tpu_space(dims)):
        assert cfgs
        assert len(set(cfgs)) == len(cfgs)
        assert all(cfg.unfit() is None for cfg in cfgs)
    assert all(cfg.unfit() is None for cfg in xla.space(dims))
    assert sum(workload.inputs()[0][2]) == lhs.shape[0] if workload.device == "cpu" else sizes.shape == rhs.shape[:1]


def test_configs_that_do_not_fit_say_why():
    assert "powers of two" in (xla.XlaConfig(rows=48).unfit() or "")
    assert "shared memory" in (tiles.TritonConfig(block_k=256).unfit() or "")
    assert "fast memory" in (tiles.TpuConfig(block_k=4096, block_n=4096).unfit() or "")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"dtypes": (jnp.bfloat16, jnp.float32)}, "one dtype"),
        ({"out_dtype": jnp.float64}, "the result the same or float32"),
        ({"rows": 0}, "no empty arrays"),
        ({"n": 36}, "multiples of 8"),
    ],
)
def test_hopper_kernels_say_what_they_do_not_serve(facts, words):
    given = {"rows": 256, "groups": 4, "k": 128, "n": 256} | facts
    assert words in (config.unsupported(Dimensions(**given)) or "")
    assert config.unsupported(Dimensions(rows=256, groups=4, k=128, n=256)) is None
