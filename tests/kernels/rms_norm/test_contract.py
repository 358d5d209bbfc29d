"""Every backend of RMSNorm against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.errors import ParamsTypeError
from ejkernel.kernels.rows import RowParams
from ejkernel.modules import RmsNorm, rms_norm
from ejkernel.modules.norms import NormArgumentError
from ejkernel.modules.rms_norm import RmsNormConfig
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor
from ejkernel.ops.core.dispatch import UnsupportedCallError
from tests.kernels.contract import OperationCase, check, check_inside_shard_map, through


def oracle(x, scale, residual, epsilon=1e-6, scale_offset=0.0):
    total = x if residual is None else x + residual
    out = total / jnp.sqrt(jnp.mean(total**2, axis=-1, keepdims=True) + epsilon)
    out = out if scale is None else out * (scale + scale_offset)
    return out if residual is None else (out, total)


def case(name, *shape, scale=True, residual=False, **options):
    make = lambda rng: [
        rng.normal(size=shape),
        rng.normal(size=shape[-1:]) if scale else None,
        rng.normal(size=shape) if residual else None,
    ]
    return OperationCase(name, make, **options)


CASES = [
    case("plain", 6, 64),
    case("without a scale", 6, 64, scale=False),
    case("residual", 5, 32, residual=True),
    case("residual without a scale", 5, 32, residual=True, scale=False),
    case("scale offset", 3, 16, kwargs={"scale_offset": 1.0, "epsilon": 1e-2}),
    case("three axes, odd columns", 2, 3, 37),
    case("one row", 1, 130, residual=True),
    case("one column", 7, 1, kwargs={"epsilon": 0.5}),
    case("one axis", 24),
    case("many rows", 70, 8),
    case("bfloat16", 6, 64, dtype="bfloat16"),
    case("float16, residual", 6, 64, dtype="float16", residual=True, limit=8e-3),
    case("no rows", 0, 8, refused_by=frozenset({"triton"})),
]
LANES = [
    case("plain, not even", 21, 128),
    case("without a scale", 16, 128, scale=False),
    case("residual, scale offset", 2, 24, 256, residual=True, kwargs={"scale_offset": 1.0}),
    case("one row", 1, 128),
    case("bfloat16, residual", 40, 128, residual=True, dtype="bfloat16"),
    case("odd columns", 4, 37, refused_by=frozenset({"pallas"})),
    case("float16", 4, 128, dtype="float16", refused_by=frozenset({"pallas"})),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_agrees_with_float64_or_refuses(case, platform):
    check(RmsNorm, platform, case, oracle)


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", LANES, ids=lambda case: case.name)
def test_tpu_backend_agrees_with_float64_or_refuses(case):
    blocks = RowParams(rows=16)
    check(RmsNorm, "pallas", case, oracle, fwd_params=blocks, bwd_params=blocks)


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_rows_may_be_sharded(platform):
    check_inside_shard_map(RmsNorm, platform, case("sharded", 8, 16), (P("d"), P()), P("d"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_agrees_on_a_gpu(case, platform):
    check(RmsNorm, platform, case, oracle)


@pytest.mark.parametrize("which", [1, 2])
def test_tpu_backend_refuses_a_scale_or_a_residual_of_float16(which):
    args = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4, 128), (128,), (4, 128))]
    args[which] = jax.ShapeDtypeStruct(args[which].shape, "float16")
    with pytest.raises(UnsupportedCallError, match="floats must be bfloat16 or float32, got float16"):
        jax.eval_shape(through(RmsNorm, "pallas"), *args)


def test_gradients_agree_where_a_program_has_several_blocks():
    x, scale = jax.random.normal(jax.random.key(0), (19, 8)), jnp.arange(1.0, 9.0)
    kernel, executor = RmsNorm(interpret=True), Executor(ConfigSelectorChain(cache=ConfigCache()))
    small = RmsNormConfig(RowParams(rows=4, programs=1), RowParams(rows=2, num_warps=16), "triton")
    of = lambda cfg: jax.grad(lambda *args: (executor(kernel, *args, None, cfg=cfg) ** 2).sum(), (0, 1))(x, scale)
    for got, want in zip(of(small), of(RmsNormConfig(platform="xla")), strict=True):
        assert jnp.allclose(got, want, atol=1e-4)


def test_params_of_a_backward_that_has_none_are_refused():
    cfg = RmsNormConfig(bwd_params=RowParams(), platform="xla")
    with pytest.raises(ParamsTypeError, match=r"rms_norm: cfg.bwd_params must be None for platform 'xla', got RowPar"):
        jax.grad(lambda x: rms_norm(x, cfg=cfg).sum())(jnp.ones((2, 8)))


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_norm_and_sum_have_the_dtype_of_x(platform):
    x, residual = (jax.ShapeDtypeStruct((4, 8), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    found = jax.eval_shape(through(RmsNorm, platform), x, None, residual)
    assert [out.dtype for out in found] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.thin(3)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis_can_be_normalised(axis):
    x = jax.random.normal(jax.random.key(0), (4, 5, 6))
    want = x / jnp.sqrt(jnp.mean(x**2, axis=axis, keepdims=True) + 1e-6)
    assert jnp.allclose(rms_norm(x, axis=axis), want, atol=1e-5)


@pytest.mark.parametrize(
    ("axis", "spec"), [(1, P("d")), (1, P(None, None, "d")), (0, P(None, "d")), (-1, P(None, "d"))]
)
def test_specs_of_a_mesh_are_those_of_the_arguments_for_any_axis(axis, spec):
    x, residual = jax.random.normal(jax.random.key(0), (2, 4, 8, 12))
    scale = jnp.arange(1.0, 1 + x.shape[axis])
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (spec, P(), spec), "out_specs": (spec, spec)}
    got = rms_norm(x, scale, residual=residual, axis=axis, mesh=mesh, **specs)
    assert all(map(jnp.allclose, got, rms_norm(x, scale, residual=residual, axis=axis)))
    with pytest.raises(NormArgumentError, match="must leave the axis that is normalised"):
        rms_norm(x, axis=axis, mesh=mesh, in_specs=P(*(None,) * (axis % 3), "d"), out_specs=P())


def test_vmap_and_jit_agree_with_the_plain_call():
    x, scale = jax.random.normal(jax.random.key(0), (3, 4, 8)), jnp.arange(8.0)
    want = rms_norm(x, scale)
    assert jnp.allclose(jax.vmap(lambda x: rms_norm(x, scale))(x), want)
    assert jnp.allclose(jax.jit(rms_norm)(x, scale), want)


@pytest.mark.parametrize("name", ["epsilon", "scale_offset"])
def test_numbers_may_be_of_numpy_and_jax_but_not_traced(name):
    x, scale, value = jnp.ones((2, 8)), jnp.arange(8.0), jnp.finfo(jnp.bfloat16).eps
    run = lambda number: rms_norm(x, scale, **{name: number})
    want = run(float(value))
    for number in (value, np.float64(value), jnp.float32(value)):
        assert jnp.array_equal(run(number), want)
    with pytest.raises(NormArgumentError, match=rf"{name} must be a number, known while tracing, got a traced"):
        jax.jit(run)(0.5)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((jnp.zeros((2, 4)), jnp.zeros(3)), {}, r"rms_norm: scale must have shape \(4,\), got \(3,\)"),
        ((jnp.zeros((2, 4)),), {"residual": jnp.zeros((2, 3))}, "residual must have the shape of x"),
        ((jnp.zeros((2, 4), int),), {}, "x must be of a floating dtype"),
        ((jnp.zeros((2, 4)),), {"axis": 2}, "axis must be in"),
        ((jnp.zeros((2, 4)),), {"axis": (0, 1)}, r"axis must be an integer, known while tracing, got \(0, 1\)"),
        ((jnp.zeros(()),), {}, "x must have at least one axis"),
        ((None,), {}, "rms_norm: x must be an array, got NoneType"),
        ((jnp.zeros((2, 4)), [1.0] * 4), {}, "scale must be an array or None, got list"),
        ((jnp.zeros((2, 4)),), {"epsilon": "1e-6"}, "epsilon must be a number, known while tracing, got '1e-6'"),
        ((jnp.zeros((2, 4)),), {"epsilon": -1.0}, "rms_norm: epsilon must be at least 0 and finite, got -1.0"),
        ((jnp.zeros((2, 4)),), {"epsilon": jnp.nan}, "epsilon must be at least 0 and finite, got nan"),
        ((jnp.zeros((2, 4)), jnp.zeros(4)), {"scale_offset": jnp.inf}, "scale_offset must be finite, got inf"),
        ((jnp.zeros((2, 4)), jnp.zeros(4, "complex64")), {}, "scale must be real, got complex64"),
        ((jnp.zeros((2, 4)),), {"residual": jnp.zeros((2, 4), "complex64")}, "residual must be real, got complex64"),
        ((jnp.zeros((2, 4)),), {"epsilon": None}, "epsilon must be a number"),
        ((jnp.zeros((2, 4)), jnp.zeros(4)), {"scale_offset": jnp.ones(4)}, "scale_offset must be a number"),
    ],
)
def test_wrong_arguments_are_named(args, kwargs, words):
    with pytest.raises(NormArgumentError, match=words):
        rms_norm(*args, **kwargs)


@pytest.mark.parametrize(("x", "words"), [(jnp.float32(1), "at least one axis"), ([1.0, 2.0], "must be an array")])
def test_the_operation_itself_names_an_x_that_has_no_axis(x, words):
    """As the command line calls it."""
    with pytest.raises(NormArgumentError, match=words):
        RmsNorm()(x)
