"""What an operation and a backend cost their authors: the base does the rest."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.modules import FlashAttentionConfig, RmsNorm, flash_attention
from ejkernel.modules.norms import NormArgumentError
from ejkernel.modules.rms_norm import RmsNormConfig
from ejkernel.ops import Autotuner, Invocation, autotune, from_json, to_json
from ejkernel.ops.core.backend import Backend, ParamsTypeError
from ejkernel.ops.core.dispatch import UnsupportedCallError
from ejkernel.ops.core.kernel import KernelDefinitionError
from ejkernel.ops.core.operation import DifferentiableOperation, Operation, OperationArgumentError
from tests.kernels.contract import OperationCase, check
from tests.kernels.rms_norm.test_contract import oracle

FILE = """
import jax.numpy as jnp
from ejkernel.kernels.rms_norm import xla
from ejkernel.kernels.rows import RowParams


def unsupported(inv, *, backward):
    return "two axes only" if inv.args[0].ndim != 2 else None


def forward_space(inv):
    return [RowParams(rows=2), RowParams(rows=1)]


def forward(x, scale, residual, *, params, epsilon, scale_offset, interpret):
    assert interpret
    parts = jnp.split(x, (params or RowParams(rows=2)).rows)
    given = {"params": None, "epsilon": epsilon, "scale_offset": scale_offset}
    found = [xla.forward(part, scale, residual, **given) for part in parts]
    return jnp.concatenate([out for out, _ in found]), jnp.concatenate([rstd for _, rstd in found])
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """RMSNorm with one more backend: a file, and one line in the list."""
    (tmp_path / "my_norm.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    from ejkernel.kernels.rows import RowParams

    class Mine(RmsNorm):
        backends = (
            Backend("mosaic", "my_norm", RowParams, interpret=True),  # The one line.
            *RmsNorm.backends,
        )

    return Mine


def call(kernel, shape=(6, 8), platform="mosaic"):
    args, kwargs = kernel.prepare(jax.ShapeDtypeStruct(shape, jnp.float32), epsilon=1e-6)
    return Invocation(kernel=kernel, args=args, kwargs=kwargs, platform=platform)


def test_a_new_backend_is_one_file_and_one_line(mine):
    make = lambda rng: [rng.normal(size=(6, 8)), rng.normal(size=8), None]
    check(mine, "mosaic", OperationCase("mine", make), oracle)  # Outputs and gradients, or it says why not.
    refused = OperationCase("refused", lambda rng: [rng.normal(size=8), None, None], refused_by=frozenset({"mosaic"}))
    check(mine, "mosaic", refused, oracle)


def test_configs_and_refusals_of_a_new_backend_follow_from_its_file(mine):
    kernel = mine(interpret=True)
    params = kernel.backend("mosaic").fwd
    assert kernel.heuristic_cfg(call(kernel)) == RmsNormConfig(params(rows=2), None, "mosaic")
    spaces = [cfg for cfg in kernel.config_space(call(kernel)) if cfg.platform == "mosaic"]
    assert [cfg.fwd_params.rows for cfg in spaces] == [2, 1]
    assert from_json(to_json(spaces[0]), RmsNormConfig) == spaces[0]  # What was tuned is stored and read.
    assert kernel.supports(call(kernel, (8,)), "mosaic") == "two axes only"
    assert "needs a GPU" in mine().supports(call(mine()), "mosaic")
    x = jnp.ones((6, 8))
    assert kernel.call((x,), {}, cfg=RmsNormConfig(params(rows=1), platform="mosaic")).shape == (6, 8)
    with pytest.raises(UnsupportedCallError, match="mosaic: two axes only"):
        kernel.call((x[0],), {}, cfg=RmsNormConfig(platform="mosaic"))
    with pytest.raises(ParamsTypeError, match=r"cfg.fwd_params must be RowParams for platform 'mosaic', got int"):
        kernel.call((x,), {}, cfg=RmsNormConfig(3, platform="mosaic"))  # pyright: ignore[reportArgumentType]


def test_platform_that_is_asked_for_and_does_not_run_is_named_with_its_reason(mine):
    x = jnp.ones((6, 8))
    with pytest.raises(UnsupportedCallError, match="asks for platform='mosaic', but mosaic needs a GPU, this is a CPU"):
        mine()(x, platform="mosaic")
    with pytest.raises(UnsupportedCallError, match="asks for platform='mosaic', but two axes only"):
        mine(interpret=True)(x[0], platform="mosaic")
    with pytest.raises(UnsupportedCallError, match=r"this is a CPU; without platform='triton' it runs by xla"):
        flash_attention(*[jnp.ones((1, 8, 2, 16))] * 3, platform="triton")
    with pytest.raises(UnsupportedCallError, match="interpreted backends are chosen by cfg= with platform='mosaic'"):
        mine(interpret=True)(x, platform="mosaic")
    with pytest.raises(OperationArgumentError, match="has no platform 'cuda', only mosaic"):
        mine()(x, platform="cuda")


def test_arguments_are_checked_once_and_platform_belongs_to_the_base():
    kernel = RmsNorm()
    args, kwargs = kernel.prepare(jnp.ones((2, 4)), epsilon=1, platform="xla")
    assert [x is None for x in args] == [False, True, True]
    assert kwargs == {"epsilon": 1.0, "scale_offset": 0.0, "platform": "xla"}
    assert "platform" not in kernel.prepare(jnp.ones((2, 4)))[1]
    with pytest.raises(NormArgumentError, match="scale must have shape"):
        kernel.prepare(jnp.ones((2, 4)), jnp.ones(3), platform="xla")
    with pytest.raises(OperationArgumentError, match="has no platform 'cudnn', only triton, mosaic, pallas, xla"):
        kernel.call((jnp.ones((2, 4)),), {}, platform="cudnn")


def test_a_config_may_leave_the_platform_open_in_both_ways():
    x, q = jnp.ones((2, 4)), jnp.ones((1, 4, 1, 4))
    for left in ("auto", None):
        cfgs = RmsNormConfig(platform=left), FlashAttentionConfig(platform=left)  # pyright: ignore[reportArgumentType]
        assert RmsNorm().call((x,), {}, cfg=cfgs[0]).shape == x.shape
        assert flash_attention(q, q, q, cfg=cfgs[1]).shape == q.shape


@dataclass(frozen=True)
class ForwardOnly:
    fwd_params: int | None = None
    platform: str | None = None


@dataclass(frozen=True)
class Nothing:
    rows: int = 1


def forward(x, *, params):
    return x, None


def test_a_backend_whose_forward_does_not_return_a_pair_is_an_error():
    class Bare(Operation[ForwardOnly, object], op_id="bare"):
        backends = (Backend("xla", SimpleNamespace(forward=lambda x, *, params: x)),)

    with pytest.raises(KernelDefinitionError, match=r"bare\[xla\]: forward must return a pair, .*got .*Tracer"):
        Bare()(jnp.ones((2, 3)))


def test_a_backend_without_a_forward_is_an_error():
    class Empty(Operation[ForwardOnly, object], op_id="empty"):
        backends = (Backend("xla", SimpleNamespace(forwards=forward)),)

    with pytest.raises(KernelDefinitionError, match=r"empty\[xla\]: .* has no function forward"):
        Empty()(jnp.ones((2, 3)))


def test_a_config_class_without_the_fields_of_an_operation_is_an_error():
    class Wrong(Operation[Nothing, object], op_id="wrong"):
        backends = (Backend("xla", SimpleNamespace(forward=forward)),)

    class NoBackward(DifferentiableOperation[ForwardOnly, object], op_id="no_backward"):
        backends = (Backend("xla", SimpleNamespace(forward=forward)),)

    class NoClass(Operation, op_id="no_class"):  # pyright: ignore[reportMissingTypeArgument]
        backends = (Backend("xla", SimpleNamespace(forward=forward)),)

    with pytest.raises(KernelDefinitionError, match=r"wrong: .*Nothing needs the fields fwd_params, platform"):
        Wrong()
    with pytest.raises(KernelDefinitionError, match=r"no_backward: .*ForwardOnly needs the field bwd_params"):
        NoBackward()
    with pytest.raises(KernelDefinitionError, match=r"no_class: .*class NoClass\(Operation\[Config, Output\]\)"):
        NoClass()


class Halves(Operation[ForwardOnly, object], op_id="halves"):
    backends = (Backend("xla", SimpleNamespace(forward=lambda x, *, params: (x / 2, None))),)
    workload_module = "tests.ops.core.test_operation"

    def reference(self, x):
        return x / 2


def test_a_reference_need_not_know_of_the_platform():
    x = jnp.arange(4.0)
    assert jnp.array_equal(Halves().reference(x, platform="xla"), x / 2)  # pyright: ignore[reportCallIssue]
    assert autotune(Halves(), x, platform="xla", tuner=Autotuner(progress=False)) == ForwardOnly(platform="xla")


def test_a_module_without_workloads_is_an_error():
    with pytest.raises(KernelDefinitionError, match=r"halves: workload_module is .* which has no WORKLOADS"):
        Halves.workloads()


def test_the_op_id_of_a_class_is_that_of_its_instances_unless_they_have_another():
    class Named(Operation[RmsNormConfig, object], op_id="my_pkg.named"):
        pass

    class Derived(Named):
        pass

    class Nameless(Operation[RmsNormConfig, object]):
        pass

    assert (Named().op_id, Named("other").op_id, Derived().op_id) == ("my_pkg.named", "other", "my_pkg.named")
    assert Nameless().op_id.endswith("Nameless")
    assert RmsNorm().op_id == "rms_norm"


def test_rms_norm_costs_no_more_than_250_lines():
    root = Path(ejkernel.__file__).parent
    files = [root / "modules" / "rms_norm.py", *(root / "kernels" / "rms_norm").glob("*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 250
