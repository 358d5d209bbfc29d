"""Every backend of LayerNorm against float64; what it shares with RMSNorm is tested there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.rows import RowParams
from ejkernel.modules import LayerNorm, layer_norm
from ejkernel.modules.norms import NormArgumentError
from tests.kernels.contract import (
    LIMITS,
    OperationCase,
    assert_close,
    check,
    check_inside_shard_map,
    outputs,
    through,
)

PLATFORMS = ["xla", "triton", "pallas"]


def oracle(x, scale, offset, residual, epsilon=1e-6):
    total = x if residual is None else x + residual
    centred = total - jnp.mean(total, axis=-1, keepdims=True)
    out = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)
    out = out if scale is None else out * scale
    out = out if offset is None else out + offset
    return out if residual is None else (out, total)


def case(name, *shape, scale=True, offset=True, residual=False, mean=3.0, **options):
    make = lambda rng: [
        rng.normal(size=shape) + mean,
        rng.normal(size=shape[-1:]) if scale else None,
        rng.normal(size=shape[-1:]) if offset else None,
        rng.normal(size=shape) if residual else None,
    ]
    return OperationCase(name, make, **options)


LANES = frozenset({"pallas"})
CASES = [
    case("plain", 21, 128),
    case("residual", 5, 128, residual=True),
    case("offset only", 6, 128, scale=False),
    case("scale only, three axes", 2, 3, 128, offset=False, kwargs={"epsilon": 1e-2}),
    case("neither", 1, 128, scale=False, offset=False),
    case("odd columns", 4, 37, refused_by=LANES),
    case("large mean", 4, 128, mean=300.0, limit=2e-4),
    case("bfloat16, residual", 18, 128, residual=True, dtype="bfloat16"),
    case("no rows", 0, 128, refused_by=frozenset({"triton", "pallas"})),
]


@pytest.mark.thin(4)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_agrees_with_float64_or_refuses(case, platform):
    params = {} if platform == "xla" else {"fwd_params": RowParams(rows=8), "bwd_params": RowParams(rows=8)}
    check(LayerNorm, platform, case, oracle, **params)


def test_float64_is_computed_in_float64():
    """With a scale, an offset and a residual too."""
    with jax.enable_x64(True):
        args, _ = case("float64", 4, 37, residual=True, dtype="float64").arrays()
        got, want = (outputs(fn, args, {}) for fn in (through(LayerNorm, "xla"), oracle))
        assert_close({name: np.asarray(x) for name, x in got.items()}, want, LIMITS["float64"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_agrees_on_a_gpu(case):
    check(LayerNorm, "triton", case, oracle)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_large_mean_is_subtracted_to_the_last_digit(platform):
    """A mean in float32 is off by more than the deviation of a row that is nearly constant."""
    call = through(LayerNorm, platform)
    assert not call(jnp.full((2, 128), 3333.3), None, None, None).any()
    x = 1e4 + jax.random.normal(jax.random.key(0), (4, 128))
    got = call(x, None, None, None)
    with jax.enable_x64(True):
        np.testing.assert_allclose(got, oracle(jnp.asarray(x, "float64"), None, None, None), atol=2e-6)


def test_rows_may_be_sharded():
    check_inside_shard_map(LayerNorm, "triton", case("sharded", 8, 16), (P("d"), P(), P()), P("d"))


def test_another_axis_can_be_normalised():
    x = jax.random.normal(jax.random.key(0), (4, 5))
    assert jnp.allclose(layer_norm(x, axis=0), layer_norm(x.T).T, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((jnp.zeros((2, 4)), None, jnp.zeros(3)), {}, r"offset must have shape \(4,\), got \(3,\)"),
        ((jnp.zeros((2, 4)),), {"axis": -3}, "layer_norm: axis must be in"),
        ((jnp.zeros((2, 4)),), {"epsilon": "1e-6"}, "layer_norm: epsilon must be a number"),
    ],
)
def test_wrong_arguments_are_named(args, kwargs, words):
    with pytest.raises(NormArgumentError, match=words):
        layer_norm(*args, **kwargs)
