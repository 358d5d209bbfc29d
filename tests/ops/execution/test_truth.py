"""The truth of a problem: one program where that can be, operation by operation where it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Autotuner, Kernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.execution.truth import once

X = jnp.arange(6.0)


def test_a_function_is_traced_once_as_a_whole():
    seen = []

    def double(x, how, nothing):
        seen.append((isinstance(x, jax.core.Tracer), how, nothing))
        return {"double": x * 2}

    assert (once(double, X, "quick", None)["double"] == X * 2).all()
    assert seen == [(True, "quick", None)]


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: np.sort(np.asarray(x)) * 2, id="numpy"),
        pytest.param(lambda x: x * 2 if x.sum() > 0 else x, id="branch"),
        pytest.param(lambda x: x[x >= 0] * 2, id="data-dependent shape"),
        pytest.param(lambda x: x * int(x[2]), id="value"),
    ],
)
def test_a_function_that_cannot_be_traced_runs_as_it_is(fn):
    np.testing.assert_array_equal(once(fn, X), X * 2)


def test_what_a_function_raises_is_raised():
    def broken(x):
        raise ValueError(f"no truth for {type(x).__name__}")

    with pytest.raises(ValueError, match="no truth for ArrayImpl"):
        once(broken, X)


class Sorted(Kernel[int, jax.Array]):
    """Its second config is wrong, and its reference knows NumPy only."""

    op_id = "tests.sorted"

    def run(self, x, *, cfg):
        return jnp.sort(x) if cfg == 1 else x

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]

    def reference(self, x):
        return np.sort(np.asarray(x))


def test_a_reference_in_numpy_proves_candidates():
    kernel = Sorted()
    call = Invocation(kernel=kernel, args=(jax.random.normal(jax.random.key(0), (64,)),), kwargs={})
    tuning = Autotuner(progress=False).tune(call, kernel)
    assert tuning.cfg == 1
    assert {c.cfg: c.status for c in tuning.candidates} == {1: "winner", 2: "wrong"}
