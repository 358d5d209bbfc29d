"""`grouped_matmul` and `ragged_dot` as users call them: every backend, every transformation, every wrong argument."""

import dataclasses
import inspect
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.grouped_matmul.dimensions import TileSizeError
from ejkernel.kernels.grouped_matmul.groups import local_groups
from ejkernel.kernels.grouped_matmul.tiles import TpuConfig, TritonConfig
from ejkernel.kernels.grouped_matmul.xla import XlaConfig
from ejkernel.modules import (
    GroupedDrhs,
    GroupedMatmul,
    GroupedMatmulConfig,
    grouped_matmul,
    ragged_dot,
)
from ejkernel.modules.grouped_matmul import GroupedMatmulArgumentError
from ejkernel.ops import (
    Autotuner,
    ConfigSelectorChain,
    Executor,
    Invocation,
    PersistentCache,
    autotune_lowered,
    set_default_executor,
)
from ejkernel.ops.utils import targets
from tests.kernels.contract import OperationCase, check, check_inside_shard_map
from tests.support import fully, table

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def owners(sizes, rows, offset, groups):
    """The group of each row among those whose weights are here; -1 where it has none."""
    which = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
    mine = which - (0 if offset is None else jnp.reshape(offset, ()))
    return jnp.where((which < sizes.shape[0]) & (mine >= 0) & (mine < groups), mine, -1)


def oracle(lhs, rhs, sizes, offset=None, existing=None, transpose_rhs=False, preferred_element_type=None):
    """One product for each row."""
    group = owners(sizes, lhs.shape[0], offset, rhs.shape[0])
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = jnp.einsum("mk,mkn->mn", lhs, rhs[jnp.maximum(group, 0)])
    return jnp.where((group >= 0)[:, None], out, 0.0 if existing is None else existing)


def case(name, rows, k, n, sizes, *, offset=None, here=None, existing=False, **options):
    groups = len(sizes) if here is None else here
    shape = (groups, n, k) if options.get("kwargs", {}).get("transpose_rhs") else (groups, k, n)
    make = lambda rng: [
        rng.normal(size=(rows, k)),
        rng.normal(size=shape),
        np.array(sizes, np.int32),
        None if offset is None else np.array([offset], np.int32),
        rng.normal(size=(rows, n)) if existing else None,
    ]
    return OperationCase(name, make, **options)


KERNELS = frozenset({"triton", "pallas"})
TILES = {
    "xla": XlaConfig(rows=16, least_rows=8),
    "triton": TritonConfig(block_m=16, block_n=32, block_k=16),
    "pallas": TpuConfig(block_m=16, block_k=128, block_n=128),
}
"""Small, so that groups have several tiles, and tiles several groups."""
CASES = [
    case("uneven, empty groups, rows of no group", 50, 24, 40, [13, 0, 20, 1, 9]),
    case("one group has everything", 40, 16, 24, [0, 40, 0]),
    case("all groups are empty", 20, 16, 24, [0, 0]),
    case("transposed", 40, 24, 16, [11, 20], kwargs={"transpose_rhs": True}),
    case("offset", 48, 16, 24, [10, 7, 0, 20, 5], offset=1, here=3),
    case("offset past the end", 30, 16, 8, [10, 10], offset=2, here=2),
    case("offset and what was there", 48, 16, 24, [10, 7, 0, 20, 5], offset=3, here=2, existing=True),
    case("what was there", 30, 8, 16, [9, 11], existing=True),
    case("bfloat16", 50, 24, 40, [13, 0, 20, 1, 9], dtype="bfloat16"),
    case("float16", 50, 24, 40, [13, 0, 20, 1, 9], dtype="float16", refused_by=frozenset({"pallas"})),
    case("a single row", 1, 8, 8, [1]),
    case("no rows", 0, 8, 8, [0, 0], refused_by=KERNELS),
]


SHORT = ("uneven, empty groups, rows of no group", "transposed", "offset and what was there", "bfloat16", "no rows")
"""What interpreters are given in the short suite."""


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("case", "platform"),
    [
        pytest.param(case, platform, id=f"{case.name}-{platform}", marks=() if short else pytest.mark.full)
        for case in CASES
        for platform in ("xla", "triton", "pallas")
        for short in [platform == "xla" or case.name in SHORT]
    ],
)
def test_backend_agrees_with_float64_or_refuses(case, platform):
    params = TILES[platform]
    check(GroupedMatmul, platform, case, oracle, fwd_params=params, dlhs_params=params, drhs_params=params)


@pytest.mark.gpu
@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_agrees_on_a_gpu(case, platform):
    # Without this, XLA multiplies float32 on a GPU with 11 bits.
    with jax.default_matmul_precision("highest"):
        check(GroupedMatmul, platform, case, oracle)


LARGE = [
    case("uneven", 500, 128, 192, [130, 0, 200, 1, 90], dtype="bfloat16"),
    case("offset", 480, 64, 128, [100, 70, 0, 200, 50], offset=1, here=3, dtype="float16"),
    case("transposed", 333, 64, 64, [100, 200], dtype="bfloat16", kwargs={"transpose_rhs": True}),
    case("odd sizes", 333, 72, 40, [100, 1, 0, 200], dtype="bfloat16"),
    case("one column of tiles", 100, 136, 8, [50, 50], dtype="float16"),
    case("rows of no 16 bytes", 64, 64, 36, [30, 34], dtype="bfloat16", refused_by=frozenset({"mosaic"})),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_hopper_kernels_agree_on_a_gpu(case):
    check(GroupedMatmul, "mosaic", case, oracle)


# --- As a JAX function ---

LHS = jax.random.normal(jax.random.key(0), (40, 8))
RHS = jax.random.normal(jax.random.key(1), (3, 8, 16))
SIZES = jnp.array([11, 0, 23], jnp.int32)


def close(a, b, limit=1e-4):
    return jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=limit, rtol=limit)), a, b))


def loss(fn, lhs, rhs, sizes=SIZES):
    return jnp.sin(fn(lhs, rhs, sizes)).sum()


def test_ragged_dot_is_that_of_lax_argument_for_argument():
    want = jax.lax.ragged_dot(LHS, RHS, SIZES, "highest", jnp.float32)
    assert close(ragged_dot(LHS, RHS, SIZES, "highest", jnp.float32), want)
    grads = [jax.grad(partial(loss, fn), (0, 1))(LHS, RHS) for fn in (ragged_dot, jax.lax.ragged_dot)]
    assert close(*grads)


def test_ragged_dot_takes_every_argument_of_lax():
    assert inspect.signature(ragged_dot).parameters.keys() >= inspect.signature(jax.lax.ragged_dot).parameters.keys()
    assert close(ragged_dot(LHS, RHS, SIZES, None, None, None, None), ragged_dot(LHS, RHS, SIZES))
    with pytest.raises(GroupedMatmulArgumentError, match=r"ragged_dot: out_sharding must be None, got .*reshard"):
        ragged_dot(LHS, RHS, SIZES, out_sharding=P("x"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("preferred", "name"), [(float, "float32"), (np.float64, "float32"), (int, "int32")])
def test_a_result_has_no_64_bits_that_are_not_enabled(preferred, name):
    existing = jnp.zeros((40, 16), name)
    out = grouped_matmul(LHS, RHS, SIZES, existing_out=existing, preferred_element_type=preferred)
    assert out.dtype.name == name


@pytest.mark.parametrize("preferred", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float16", "bfloat16"), ("bfloat16", "float32"), ("int8",) * 2])
def test_result_has_the_dtype_of_lax(dtypes, preferred):
    args = (LHS.astype(dtypes[0]), RHS.astype(dtypes[1]), SIZES)
    call = lambda fn: jax.eval_shape(lambda *a: fn(*a, preferred_element_type=preferred), *args).dtype
    assert call(ragged_dot) == call(jax.lax.ragged_dot)


def test_gradients_of_gradients_are_grouped_products_too():
    dense = lambda lhs, rhs, _: jnp.concatenate([lhs[:11] @ rhs[0], lhs[11:34] @ rhs[2], jnp.zeros((6, 16))])

    def second(fn):
        inner = lambda lhs, rhs: sum((g**2).sum() for g in jax.grad(partial(loss, fn), (0, 1))(lhs, rhs))
        return jax.grad(inner, (0, 1))(LHS, RHS)

    assert close(second(grouped_matmul), second(dense), 1e-3)


TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f),
    "remat": lambda f: jax.checkpoint(f),
    "scan": lambda f: lambda *a: jax.lax.scan(lambda c, _: (c + f(*a), None), 0.0, None, length=2)[0] / 2,
    "vmap over lhs": lambda f: lambda l, r, s: jax.vmap(f, (0, None, None))(jnp.stack([l, l]), r, s).mean(),
    "vmap over sizes": lambda f: lambda l, r, s: jax.vmap(f, (None, None, 0))(l, r, jnp.stack([s, s])).mean(),
    "vmap over all": lambda f: lambda *a: jax.vmap(f)(*(jnp.stack([x, x]) for x in a)).mean(),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_value_and_gradients_survive_every_transformation(name):
    f = partial(loss, grouped_matmul)
    both = lambda f: jax.value_and_grad(f, (0, 1))(LHS, RHS, SIZES)
    assert close(both(TRANSFORMATIONS[name](f)), both(f))


def test_experts_are_spread_over_devices_by_their_offset():
    mesh = jax.make_mesh((4,), ("experts",), axis_types=(AxisType.Auto,))
    rhs, sizes = jax.random.normal(jax.random.key(2), (8, 8, 16)), jnp.array([5, 0, 9, 1, 3, 8, 2, 4], jnp.int32)

    def local(lhs, rhs, sizes):
        first = jax.lax.axis_index("experts") * rhs.shape[0]
        return jax.lax.psum(grouped_matmul(lhs, rhs, sizes, first), "experts")

    specs = (P(), P("experts"), P())
    spread = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    both = lambda fn: jax.value_and_grad(lambda l, r: jnp.sin(fn(l, r, sizes)).sum(), (0, 1))(LHS, rhs)
    assert close(both(spread), both(grouped_matmul))


@pytest.mark.parametrize("platform", ["xla", *fully("triton", "pallas")])
def test_columns_may_be_sharded(platform):
    params, sharded = TILES[platform], P(None, None, "d")
    fixed = {"fwd_params": params, "dlhs_params": params, "drhs_params": params}
    given = case("columns", 20, 16, 32, [7, 9])
    check_inside_shard_map(GroupedMatmul, platform, given, (P(), sharded, P()), P(None, "d"), **fixed)


def test_columns_are_spread_over_a_mesh_by_its_arguments():
    mesh = jax.make_mesh((4,), ("columns",), axis_types=(AxisType.Auto,))
    specs = (P(), P(None, None, "columns"), P())
    got = grouped_matmul(LHS, RHS, SIZES, mesh=mesh, in_specs=specs, out_specs=P(None, "columns"))
    assert close(got, grouped_matmul(LHS, RHS, SIZES))


def test_whole_arrays_may_be_on_a_mesh_with_explicit_axes():
    with jax.set_mesh(jax.make_mesh((4,), ("columns",), axis_types=(AxisType.Explicit,))):
        got = jax.value_and_grad(loss, (1, 2))(grouped_matmul, LHS, RHS)
    assert close(got, jax.value_and_grad(loss, (1, 2))(grouped_matmul, LHS, RHS))


def test_an_axis_may_stay_explicit_inside_of_a_shard_map_over_others():
    mesh = jax.make_mesh((2, 2), ("inner", "columns"), axis_types=(AxisType.Explicit,) * 2)
    placed = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))
    specs = (P(), P(None, None, "columns"), P())
    mapped = jax.shard_map(grouped_matmul, in_specs=specs, out_specs=P(None, "columns"), axis_names={"columns"})
    with jax.set_mesh(mesh):
        got = jax.jit(mapped)(placed(LHS, None, "inner"), placed(RHS, None, "inner", "columns"), placed(SIZES))
    assert close(got, grouped_matmul(LHS, RHS, SIZES))


def test_programs_are_exported_for_any_number_of_rows():
    few = XlaConfig(rows=64, least_rows=16, steps=1)
    call = partial(grouped_matmul, cfg=GroupedMatmulConfig(few, few, few, platform="xla"))
    step = jax.jit(jax.value_and_grad(partial(loss, call), (0, 1)))
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8"), jnp.float32)
    exported = export.export(step)(shape, RHS, SIZES)
    for rows in (34, 700):
        lhs = jnp.resize(LHS, (rows, 8))
        assert close(exported.call(lhs, RHS, SIZES), step(lhs, RHS, SIZES))


def test_a_config_may_fix_every_pass():
    params = XlaConfig(rows=8, least_rows=4)
    cfg = GroupedMatmulConfig(params, params, params, platform="xla")
    got = jax.grad(lambda l, r: loss(partial(grouped_matmul, cfg=cfg), l, r), (0, 1))(LHS, RHS)
    assert close(got, jax.grad(partial(loss, grouped_matmul), (0, 1))(LHS, RHS))


@pytest.mark.full
def test_each_pass_is_tuned_and_stored_apart(tmp_path):
    tuner = Autotuner(progress=False, max_candidates=2)
    selector = ConfigSelectorChain(persistent=PersistentCache(tmp_path), tuner=tuner)
    set_default_executor(Executor(selector))
    step = jax.jit(jax.grad(partial(loss, grouped_matmul), (0, 1)))
    result = autotune_lowered(selector, step.lower(LHS, RHS))
    assert sorted(entry.op_id for entry in result.entries) == ["grouped_matmul"] * 2 + ["grouped_matmul_drhs"]


def test_no_groups_give_zeros():
    assert not jnp.any(grouped_matmul(LHS, RHS[:0], SIZES[:0]))


def test_rows_past_the_groups_are_never_read():
    poisoned = LHS.at[34:].set(jnp.nan)
    assert close(grouped_matmul(poisoned, RHS, SIZES), grouped_matmul(LHS, RHS, SIZES))
    grads = [jax.grad(partial(loss, grouped_matmul), 1)(lhs, RHS) for lhs in (poisoned, LHS)]
    assert close(*grads)


def test_impossible_sizes_inside_of_a_program_are_cut():
    call = jax.jit(grouped_matmul)
    assert close(call(LHS, RHS, jnp.array([30, 30, 5])), grouped_matmul(LHS, RHS, jnp.array([30, 10, 0])))
    assert close(call(LHS, RHS, jnp.array([30, -4, 5])), grouped_matmul(LHS, RHS, jnp.array([30, 0, 5])))


def test_sizes_whose_sum_overflows_are_cut():
    call = jax.jit(grouped_matmul)
    most = jnp.iinfo(jnp.int32).max
    assert close(call(LHS, RHS, jnp.array([3, most, most])), grouped_matmul(LHS, RHS, jnp.array([3, 37, 0])))


def test_sizes_are_cut_where_the_rows_end():
    """Kernels rely on it: their tables of work have room for the rows that there are."""
    sizes = jnp.array([3, -2, 5, 9, 4])
    assert local_groups(sizes, None, 5, 10).sizes.tolist() == [3, 0, 5, 2, 0]
    assert local_groups(sizes, 2, 2, 10).sizes.tolist() == [5, 2]
    assert local_groups(sizes, 4, 1, 10).first_row == 10
    most = jnp.array([2**32 - 1, 7], jnp.uint32)
    assert local_groups(most, None, 2, 10).sizes.tolist() == [10, 0]
    rows = 8_000_000
    assert local_groups(jnp.full(300, rows), None, 300, rows).sizes.tolist() == [rows, *[0] * 299]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_64_bits_may_be_enabled(dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        lhs, rhs = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((40, 8), (3, 8, 16)))
        of = lambda fn: jax.grad(lambda a, b: fn(a, b, jnp.array([11, 0, 23])).astype(float).sum(), (0, 1))(lhs, rhs)
        for got, want in zip(of(grouped_matmul), of(jax.lax.ragged_dot), strict=True):
            np.testing.assert_allclose(
                got.astype(float), want.astype(float), rtol=1e-2 if dtype == "bfloat16" else 1e-5
            )


@pytest.mark.parametrize("dtypes", [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "float32")])
def test_a_float8_operand_has_gradients_and_is_not_copied(dtypes):
    lhs, rhs, sizes = jnp.ones((40, 8), dtypes[0]), jnp.ones((3, 8, 16), dtypes[1]), jnp.array([11, 0, 23])
    grads = jax.grad(lambda *a: grouped_matmul(*a, sizes).astype("float32").sum(), (0, 1))(lhs, rhs)
    assert [g.dtype.name for g in grads] == list(dtypes)
    assert (float(grads[0][0, 0]), float(grads[1][0, 0, 0])) == (16.0, 11.0)
    shapes = [((1, 1024), dtypes[0]), ((16, 1024, 1024), dtypes[1]), ((16,), "int32")]
    lowered = jax.jit(grouped_matmul).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= 1 << 20


def test_small_gradients_of_float8_operands_are_not_zero():
    lhs, rhs = jnp.ones((40, 8), "float8_e4m3fn"), jnp.full((3, 8, 16), 64, "float8_e4m3fn")
    given = jnp.full((40, 16), 1e-4)
    of = lambda fn: jax.vjp(lambda lhs: fn(lhs, rhs, SIZES, preferred_element_type="float32"), lhs)[1](given)[0]
    assert of(ragged_dot)[0, 0] == of(jax.lax.ragged_dot)[0, 0] > 0


@pytest.mark.parametrize(
    ("dtypes", "preferred"),
    [(("int4", "int4"), None), (("int4", "int4"), "int32"), (("uint4",) * 2, "bfloat16"), (("bfloat16", "int4"), None)],
)
def test_operands_of_less_than_a_byte_are_multiplied_and_not_copied(dtypes, preferred):
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.integers(0, 2, s), d) for s, d in zip(((40, 7), (3, 7, 16)), dtypes, strict=True))
    out = ragged_dot(lhs, rhs, SIZES, None, preferred)
    want = jax.lax.ragged_dot(lhs, rhs, SIZES, None, preferred)
    assert out.dtype == want.dtype
    np.testing.assert_array_equal(out.astype("float32"), want.astype("float32"))
    shapes = [((1, 1024), dtypes[0]), ((16, 1024, 1024), dtypes[1]), ((16,), "int32")]
    lowered = jax.jit(partial(grouped_matmul, preferred_element_type=preferred)).lower(
        *(jax.ShapeDtypeStruct(*s) for s in shapes)
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        ("bfloat16", "int4"),
        ("float32", "uint4"),
        ("float8_e4m3fn", "int8"),
        ("float8_e5m2", "int4"),
        ("float16", "int8"),
    ],
)
def test_rows_have_gradients_beside_weights_that_are_integers(dtype, other):
    rng = np.random.default_rng(0)
    lhs, rhs = jnp.asarray(rng.normal(size=(40, 8)), dtype), jnp.asarray(rng.integers(0, 4, (3, 8, 16)), other)
    dout = jnp.asarray(rng.uniform(-0.9, 0.9, (40, 16)), "float32")
    call = lambda lhs: ragged_dot(lhs, rhs, SIZES, preferred_element_type="float32")
    (got,) = jax.vjp(call, lhs)[1](dout)
    want = jax.vjp(lambda lhs: ragged_dot(lhs, rhs.astype("float32"), SIZES), lhs.astype("float32"))[1](dout)[0]
    assert got.dtype == lhs.dtype
    np.testing.assert_allclose(got.astype("float32"), want, atol=float(2 * jnp.finfo(dtype).eps) * abs(want).max())


@pytest.mark.parametrize("make", [XlaConfig, TritonConfig, TpuConfig])
def test_sizes_of_configs_are_above_zero(make):
    name = dataclasses.fields(make)[0].name
    with pytest.raises(TileSizeError, match=rf"sizes must be integers above 0, got {name}=0"):
        make(**{name: 0})


@pytest.mark.parametrize("offset", [-9, -5, -2, -1, 3, 9])
def test_an_offset_inside_of_a_program_may_be_outside_of_the_groups(offset):
    existing = jnp.ones((40, 16))
    got = jax.jit(grouped_matmul)(LHS, RHS, SIZES, jnp.int32(offset), existing)
    assert close(got, oracle(LHS, RHS, SIZES, offset, existing))


def test_float8_is_summed_in_float32():
    lhs, rhs = LHS.astype("float8_e4m3fn"), RHS.astype("float8_e4m3fn")
    want = grouped_matmul(lhs.astype("float32"), rhs.astype("float32"), SIZES).astype("float8_e4m3fn")
    assert jnp.array_equal(grouped_matmul(lhs, rhs, SIZES), want)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lhs": LHS[:, :, None]}, r"lhs must be \[rows, k\]"),
        ({"lhs": LHS[None]}, r"grouped_matmul: lhs must be \[rows, k\] .* Reshape lhs to two axes"),
        ({"rhs": None}, "rhs must be an array, got NoneType"),
        ({"rhs": RHS[0]}, r"rhs \[groups, k, n\] with the same k"),
        ({"rhs": RHS[:, 1:]}, "with the same k"),
        ({"rhs": RHS.swapaxes(1, 2)}, "need transpose_rhs=True"),
        ({"transpose_rhs": True}, r"rhs \[groups, n, k\] .* need transpose_rhs=False"),
        ({"group_sizes": SIZES[:2]}, "one entry per group of rhs, 3, got 2"),
        ({"group_sizes": SIZES.astype(float)}, "must be integers"),
        ({"group_sizes": [30, 20, 40]}, "add up to 40 rows at most, got a least size of 20 and a sum of 90"),
        ({"group_sizes": np.array([3, -1, 4])}, "a least size of -1"),
        ({"lhs": LHS[None]}, r"lhs must be \[rows, k\]"),
        ({"group_sizes": jnp.stack([SIZES, SIZES])}, "must be integers"),
        ({"group_offset": -1}, "group_offset must be from 0 to 3"),
        ({"group_offset": np.array([-1])}, "group_offset must be from 0 to 3"),
        ({"group_offset": jnp.array([4])}, "group_offset must be from 0 to 3"),
        ({"group_offset": [7]}, "group_offset must be from 0 to 3"),
        ({"group_offset": 1.5}, "group_offset must be one integer"),
        ({"group_offset": jnp.arange(2)}, "group_offset must be one integer"),
        ({"existing_out": jnp.zeros((40, 8))}, r"existing_out must be float32\[40, 16\]"),
        ({"existing_out": jnp.zeros((40, 16), jnp.bfloat16)}, "got bfloat16"),
        ({"existing_out": 0.0}, r"existing_out must be float32\[40, 16\], as the result, got float"),
        ({"group_offset": 2**70}, "group_offset must be from 0 to 3"),
        ({"precision": "best"}, "precision must be"),
        ({"precision": True}, "precision must be .* got True"),
        ({"precision": jnp.array(1.0)}, "precision must be"),
        ({"precision": ["highest"]}, "precision must be"),
        ({"precision": {}}, "precision must be"),
        ({"preferred_element_type": "S"}, "preferred_element_type must be a dtype, .* got 'S'"),
        ({"preferred_element_type": object}, "preferred_element_type must be a dtype"),
        ({"preferred_element_type": "float31"}, "preferred_element_type must be a dtype"),
        ({"transpose_rhs": "no"}, "transpose_rhs must be True or False, known while tracing, got 'no'"),
        ({"group_offset": "1"}, "group_offset must be one integer, got str"),
        ({"cfg": 3}, "cfg must be a GroupedMatmulConfig"),
        ({"platform": "cuda"}, "has no platform 'cuda'"),
    ],
)
def test_wrong_arguments_are_named(changed, words):
    with pytest.raises(ValueError, match=words):
        grouped_matmul(**({"lhs": LHS, "rhs": RHS, "group_sizes": SIZES} | changed))


@pytest.mark.parametrize("name", ["transpose_rhs", "precision", "preferred_element_type"])
def test_a_traced_option_is_named(name):
    with pytest.raises(GroupedMatmulArgumentError, match=rf"{name} must .*known while tracing, got a traced bool\[\]"):
        jax.jit(lambda x: grouped_matmul(LHS, RHS, SIZES, **{name: x}))(True)


def test_drhs_is_an_operation_of_its_own():
    dout = jax.random.normal(jax.random.key(3), (40, 16))
    want = jax.vjp(lambda r: grouped_matmul(LHS, r, SIZES), RHS)[1](dout)[0]
    assert close(GroupedDrhs()(LHS, dout, SIZES), want)
    assert close(GroupedDrhs()(LHS, dout, SIZES.tolist()), want)
    with pytest.raises(GroupedMatmulArgumentError, match=r"grouped_matmul_drhs: .*with the same rows"):
        GroupedDrhs()(LHS, dout[1:], SIZES)


@pytest.mark.parametrize(("transposed", "offset"), table([False, True], [1, None]))
def test_what_configs_are_compared_with_has_the_same_gradients(transposed, offset):
    kernel, rhs = GroupedMatmul(), RHS.swapaxes(1, 2) if transposed else RHS
    rhs, options = rhs[:2] if offset else rhs, {"transpose_rhs": transposed, "out_dtype": "float32"}
    both = [lambda a, b: kernel(a, b, SIZES, offset, transpose_rhs=transposed)]
    both += [lambda a, b: kernel.reference(a, b, SIZES, offset, None, **options)]
    assert close(*(jax.vjp(fn, LHS, rhs)[1](jnp.cos(both[0](LHS, rhs))) for fn in both))


def test_what_configs_of_drhs_are_compared_with_has_the_same_gradients():
    kernel, dout = GroupedDrhs(), jax.random.normal(jax.random.key(2), (40, 16))
    both = [
        lambda a, b: kernel(a, b, SIZES),
        lambda a, b: kernel.reference(a, b, SIZES, None, groups=3, out_dtype="float32"),
    ]
    assert close(*(jax.vjp(fn, LHS, dout)[1](RHS) for fn in both))


def test_a_kernel_whose_packages_are_missing_is_not_chosen(monkeypatch):
    # JAX 0.10 does not install what Pallas' Mosaic dialect imports.
    for name in ("mosaic", "mosaic_drhs"):
        monkeypatch.setitem(sys.modules, f"ejkernel.kernels.grouped_matmul.{name}", None)
    lhs, rhs, sizes = jnp.zeros((64, 128), "bfloat16"), jnp.zeros((4, 128, 256), "bfloat16"), jnp.full(4, 16)
    with targets.compiling_for(targets.find("sm_90a")):
        for kernel, arrays in ((GroupedMatmul(), (lhs, rhs, sizes)), (GroupedDrhs(), (lhs, lhs @ rhs[0], sizes))):
            args, kwargs = kernel.prepare(*arrays)
            inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
            refusal = kernel.backend("mosaic").refusal(inv, backward=False, interpret=False)
            assert "mosaic cannot be imported" in (refusal or "")
            assert kernel.heuristic_cfg(inv).platform == "triton"
