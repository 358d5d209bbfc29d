"""What counts as the same answer."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.ops.tuning.comparison import mismatch, norm_mismatch, tolerance_for

WANT = np.linspace(-1, 1, 100)


def off_by(relative, dtype):
    return jnp.asarray(WANT * (1 + relative), dtype), jnp.asarray(WANT, dtype)


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [("float32", 1e-5, 1e-3), ("float16", 2e-3, 5e-2), ("bfloat16", 1e-2, 2e-1), ("complex64", 1e-5, 1e-3)],
)
def test_tolerance_grows_with_the_coarseness_of_the_dtype(dtype, right, wrong):
    assert mismatch(*off_by(right, dtype)) is None
    assert f"of {dtype}" in mismatch(*off_by(wrong, dtype))


def test_double_precision_is_held_to_it():
    with jax.enable_x64(True):
        assert mismatch(*off_by(1e-12, "float64")) is None
        assert "of float64" in mismatch(*off_by(1e-6, "float64"))


@pytest.mark.parametrize("override", [0.5, {"float32": 0.5}, {"bfloat16": 1e-9, "float32": 0.5}])
def test_override_wins(override):
    assert mismatch(*off_by(0.1, "float32"), override) is None


def test_mapping_without_the_dtype_leaves_the_default():
    assert tolerance_for("float32", {"bfloat16": 0.5}) == tolerance_for("float32", None)
    assert tolerance_for("float32", {"float32": 0}) == 0


def test_narrow_floats_have_a_wide_tolerance():
    assert tolerance_for(ml_dtypes.float8_e4m3fn, None) > tolerance_for(ml_dtypes.bfloat16, None)
    got, want = (x.astype(jnp.float8_e4m3fn) for x in off_by(0.05, "float32"))
    assert mismatch(got, want) is None


def test_small_elements_are_judged_by_the_size_of_the_whole():
    want = jnp.array([1.0, 1.0, 1e-9])
    assert mismatch(want.at[2].set(2e-9), want) is None
    assert mismatch(want.at[2].set(1e-2), want) is not None


@pytest.mark.parametrize("fill", [jnp.inf, -jnp.inf, jnp.nan, float(jnp.finfo(jnp.float32).min)])
def test_masked_elements_must_agree_and_hide_no_errors(fill):
    want = jnp.array([fill, 1.0, 2.0])
    assert mismatch(want, want) is None
    assert mismatch(want.at[1].set(1.1), want) is not None
    assert mismatch(want.at[0].set(0.0), want) is not None
    assert mismatch(jnp.array([0.0, 1.0, 2.0]).at[1].set(fill), jnp.array([0.0, 1.0, 2.0])) is not None


def test_infinities_of_other_sign_differ():
    assert mismatch(jnp.array([jnp.inf]), jnp.array([-jnp.inf])) is not None


def test_huge_and_tiny_truths_do_not_overflow_the_comparison():
    for scale in (1e37, 1e-30):
        want = jnp.linspace(-1, 1, 10, dtype=jnp.float32) * scale
        assert mismatch(want, want) is None
        assert mismatch(-want, want) is not None
        assert mismatch(want * 1.01, want) is not None


def test_zero_is_not_something():
    assert mismatch(jnp.zeros(3), jnp.zeros(3)) is None
    assert mismatch(jnp.ones(3), jnp.zeros(3)) is not None


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_are_exact(dtype):
    want = jnp.array([0, 1, 1]).astype(dtype)
    assert mismatch(want, want) is None
    assert mismatch(jnp.ones_like(want), want) == "1 of 3 elements differ"


def test_keys_are_compared_by_their_bits():
    assert mismatch(jax.random.key(0), jax.random.key(0)) is None
    assert mismatch(jax.random.key(1), jax.random.key(0)) is not None


def test_place_of_the_difference_is_named():
    want = {"a": jnp.ones(2), "b": (jnp.ones(3), jnp.ones(1))}
    got = {"a": jnp.ones(2), "b": (jnp.ones(4), jnp.ones(1))}
    assert mismatch(got, want) == "output['b'][0]: shape (4,) instead of (3,)"
    assert mismatch(want["b"], want["a"]).startswith("structure ")


def test_empty_and_scalar_outputs_compare():
    assert mismatch(jnp.zeros((0, 3)), jnp.zeros((0, 3))) is None
    assert mismatch(jnp.float32(2), jnp.float32(2)) is None
    assert mismatch(jnp.float32(2), jnp.float32(3)) is not None
    assert mismatch((), ()) is None


def test_reference_may_return_numpy_or_plain_numbers():
    assert mismatch(jnp.ones(3), np.ones(3, np.float32)) is None
    assert mismatch(jnp.float32(2), 2.0) is None


def test_norm_passes_a_spoiled_element_and_no_spoiled_array():
    want = jnp.ones((100, 100), jnp.bfloat16)
    limits = {"bfloat16": 1e-2}
    assert norm_mismatch([want.at[0, 0].set(1.5)], [want], limits) is None
    assert "relative error 2.0e-01" in norm_mismatch([want * 0.8], [want], limits)
    assert "output[1]" in norm_mismatch([want, want * 0], [want, want], limits)
    assert norm_mismatch([want * 0], [want * 0], limits) is None
    assert norm_mismatch([want * 0], [want], {"float32": 1e-2}) is None
