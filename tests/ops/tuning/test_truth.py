"""The truth of a problem: one program where that can be, operation by operation where it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Autotuner, Kernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.tuning import gradients, truth
from ejkernel.ops.tuning.truth import once

X = jnp.arange(6.0)


@pytest.fixture
def gpu(monkeypatch):
    """What is done on a GPU, here: a CPU's compiler takes the same options. Returns those of each program."""
    options, jit = [], jax.jit

    def watched(fn, **kwargs):
        if "compiler_options" in kwargs:
            options.append(kwargs["compiler_options"])
        return jit(fn, **kwargs)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "jit", watched)
    return options


def watched(seen):
    def double(x, how, nothing):
        seen.append((isinstance(x, jax.core.Tracer), how, nothing))
        return {"double": x * 2}

    return double


def test_on_a_gpu_a_function_is_one_program_compiled_in_a_hurry(gpu):
    seen = []
    assert (once(watched(seen), X, "quick", None)["double"] == X * 2).all()
    assert seen == [(True, "quick", None)]
    assert gpu[0]["xla_gpu_autotune_level"] == 0


def test_elsewhere_a_function_runs_operation_by_operation():
    seen = []
    assert (once(watched(seen), X, "quick", None)["double"] == X * 2).all()
    assert seen == [(False, "quick", None)]


@pytest.mark.usefixtures("gpu")
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


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "slow",
    [
        pytest.param(lambda x: sum((x for _ in range(truth.MAX_EQUATIONS + 1)), x), id="loop in Python"),
        pytest.param(lambda x: jax.device_put(x, jax.devices()[0]) * 2, id="a device of its own"),
    ],
)
def test_a_function_that_is_better_not_one_program_is_not(slow):
    kinds = []

    def fn(x):
        kinds.append(isinstance(x, jax.core.Tracer))
        return slow(x)

    np.testing.assert_array_equal(once(fn, X), slow(X))
    assert kinds == [True, False]


@pytest.mark.usefixtures("gpu")
def test_one_program_rounds_where_the_operations_do():
    keys = jax.random.split(jax.random.key(0), 3)
    a, b, c = (jax.random.normal(key, (256,), jnp.bfloat16) for key in keys)
    fn = lambda a, b, c: (a * b + c).astype(jnp.float32)
    np.testing.assert_array_equal(once(fn, a, b, c), fn(a, b, c))


@pytest.mark.usefixtures("gpu")
def test_what_a_function_raises_is_raised_alone():
    def broken(x):
        raise ValueError(f"no truth for {type(x).__name__}")

    with pytest.raises(ValueError, match="no truth for ArrayImpl") as caught:
        once(broken, X)
    assert caught.value.__context__ is None


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


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_reference_in_numpy_proves_candidates(backend, monkeypatch):
    monkeypatch.setattr(truth.jax, "default_backend", lambda: backend)
    kernel = Sorted()
    call = Invocation(kernel=kernel, args=(jax.random.normal(jax.random.key(0), (64,)),), kwargs={})
    tuning = Autotuner(progress=False, timer="wall").tune(call, kernel)
    assert tuning.cfg == 1
    assert {c.cfg: c.status for c in tuning.candidates} == {1: "winner", 2: "wrong"}


def test_a_gradient_is_the_same_as_one_program(gpu):
    class Cubed(Sorted):
        def reference(self, x, *, how):
            return x**3 if how == "quick" else x

    out, grads = gradients._true_pair(Cubed(), (X,), {"how": "quick"})
    np.testing.assert_allclose(out, X**3)
    (grad,) = grads.values()
    cotangent = gradients._cotangent(X**3)
    np.testing.assert_allclose(grad, 3 * X**2 * cotangent, rtol=1e-6)
    assert gpu
