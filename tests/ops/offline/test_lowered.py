"""Tuning a whole program before it runs, in this process and in others."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ejkernel.ops import (
    Autotuner,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    autotune_lowered,
    specs_of,
)
from ejkernel.ops.offline import specs
from ejkernel.ops.offline.lowered import ProgramError, UnmatchedCallWarning, labels_of, match, tune_each
from tests import offline_program, recorded_kernels, recorded_types
from tests.support import OwnBackward, Plain, Scale, fully

X = jnp.linspace(0.1, 1.0, 8)
ROOT = Path(__file__).parents[3]


class Always(Autotuner):
    """A tuner that proves its candidates as ever, but whose choice a test can foresee."""

    def tune(self, inv, kernel, **kwargs):
        import dataclasses

        tuning = super().tune(inv, kernel, **kwargs)
        last = list(kernel.config_space(inv))[-1]
        return dataclasses.replace(tuning, cfg=last)


class Harmless(OwnBackward):
    """Configs that change nothing about the result, so that each of them is right."""

    def run(self, x, y, *, cfg):
        return jnp.sin(x) * y + 0.0 * cfg.factor

    def fwd_with_residuals(self, x, y, *, cfg):
        return self.run(x, y, cfg=cfg), (jnp.sin(x), jnp.cos(x))

    def vjp(self, residuals, out, dout, x, y, *, cfg):
        return dout * residuals[1] * y + 0.0 * cfg.factor, dout * residuals[0]


@pytest.fixture
def setting(tmp_path):
    selector = ConfigSelectorChain(cache=ConfigCache(), persistent=PersistentCache(tmp_path / "store"), tuner=Always())
    return selector, Executor(selector), Harmless("harmless")


def programs(f, *args):
    lowered = jax.jit(f).lower(*args)
    return {
        "lowered": lowered,
        "compiled": lowered.compile(),
        "stablehlo": lowered.as_text(debug_info=True),
        "hlo": lowered.compile().as_text(),
        "flax": nnx.jit(f).lower(*args),
    }


@pytest.mark.thin(2)
@pytest.mark.parametrize("mode", ["hash", "json"])
@pytest.mark.parametrize("form", ["lowered", "compiled", "stablehlo", "hlo", "file", "flax"])
def test_every_call_of_a_program_that_never_ran_is_tuned_once(setting, form, mode, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", mode)
    selector, executor, kernel = setting
    f = jax.grad(lambda x: (executor(kernel, x, x) + executor(kernel, 2 * x, x)).sum())
    found = programs(f, jax.ShapeDtypeStruct((8,), jnp.float32))
    if form == "file":
        (tmp_path / "program.hlo").write_text(found["hlo"])
        program = tmp_path / "program.hlo"
    else:
        program = found[form]
    result = autotune_lowered(selector, program)
    assert {entry.op_id: entry.cfg for entry in result} == {"harmless": Scale(2), "harmless.vjp": Scale(3)}
    assert len(result) == 2
    assert result.unmatched == ()
    assert {e.place.op_id for e in selector.persistent.entries()} == {"harmless", "harmless.vjp"}
    assert executor.explain(kernel, X, X).tier == "memory"


@pytest.mark.thin(2)
@pytest.mark.parametrize("where", ["scan", "cond", "while", "remat", "shard_map", "custom_vjp", "vmap"])
def test_calls_inside_control_flow_are_found(setting, where):
    selector, executor, kernel = setting
    call = lambda x: executor(kernel, x, x)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    own = jax.custom_vjp(call)
    own.defvjp(lambda x: (call(x), x), lambda x, ct: (ct * x,))
    f = {
        "scan": lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=2)[0],
        "cond": lambda x: jax.lax.cond(x.sum() > 0, call, lambda x: x, x),
        "while": lambda x: jax.lax.while_loop(lambda x: x.sum() > 1e-3, call, x),
        "remat": jax.grad(lambda x: jax.checkpoint(call)(x).sum()),
        "shard_map": jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec),
        "custom_vjp": own,
        "vmap": lambda x: jax.vmap(call)(x[None]),
    }[where]
    result = autotune_lowered(selector, jax.jit(f).lower(X))
    want = {"harmless", "harmless.vjp"} if where == "remat" else {"harmless"}
    assert {entry.op_id for entry in result} == want
    # The entries are the ones that the very same program asks for.
    with_policy = Executor(ConfigSelectorChain(persistent=selector.persistent, autotune="frozen"))
    executor.chooser.policy = with_policy.chooser.policy
    jax.block_until_ready(jax.jit(f)(X))


def test_result_takes_effect_in_functions_that_were_jitted_before(setting):
    _, executor, _ = setting
    kernel = Plain("plain")
    f = jax.jit(lambda x: executor(kernel, x, x))
    before = f(X)
    key = executor.explain(kernel, X, X).key
    result = AutotuningResult(key[0], [specs_entry(key, Scale(2))])
    with result, result:
        np.testing.assert_allclose(f(X), 2 * before, rtol=1e-6)
    np.testing.assert_allclose(f(X), before)


def specs_entry(key, cfg):
    from ejkernel.ops import Entry

    return Entry(key[1], key[2], cfg)


def test_what_cannot_be_matched_is_listed_and_warned_about(setting):
    selector, executor, kernel = setting
    text = jax.jit(lambda x: executor(kernel, x, x)).lower(X).as_text(debug_info=True)
    from ejkernel.ops import registry

    registry.clear()
    with pytest.warns(UnmatchedCallWarning, match="harmless .*: was not traced in this process, and no specs"):
        result = autotune_lowered(selector, text)
    assert len(result.unmatched) == 1
    assert len(result) == 0


@pytest.mark.parametrize(
    ("program", "message"), [(3, "got int"), (jnp.sin, "got "), ("/no/such/file", "not the text of a program")]
)
def test_what_is_no_program_is_refused(setting, program, message):
    with pytest.raises(ProgramError, match=message):
        autotune_lowered(setting[0], program)


def test_arguments_in_the_wrong_order_are_named(setting):
    with pytest.raises(ProgramError, match=r"Write autotune_lowered\(selector, lowered\)"):
        autotune_lowered(jax.jit(lambda x: x).lower(X), setting[0])


# --- Another process, later ---


def run(*command, cwd=ROOT, **env):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, *command], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("program", ["step.hlo", *fully("step.mlir")])
def test_train_step_is_lowered_here_tuned_there_and_runs_frozen_elsewhere(tmp_path, program):
    record_dir, tuned = tmp_path / "recorded", tmp_path / "pack.json"
    run(
        "-m",
        "tests.offline_program",
        "lower",
        str(tmp_path / program),
        EJKERNEL_CACHE_DIR=str(record_dir),
        EJKERNEL_OPS_RECORD="1",
    )
    record = record_dir / "record.json"
    assert {s["op_id"] for s in specs.read(record)} == {"norm", "norm.vjp", "mix", "feed"}
    listed = run("-m", "ejkernel", "labels", str(tmp_path / program), "--specs", str(record))
    assert "norm.vjp" in listed
    assert "float32[2,16,32]" in listed
    run(
        "-m", "ejkernel", "tune", str(tmp_path / program), "--specs", str(record),
        "--isolation", "thread", "--out", str(tuned), EJKERNEL_CACHE_DIR=str(tmp_path / "tuning"),
    )  # fmt: skip
    frozen = run(
        "-m", "tests.offline_program", "run", EJKERNEL_CACHE_DIR=str(tmp_path / "empty"),
        EJKERNEL_CACHE_PACKS=str(tuned), EJKERNEL_AUTOTUNE="frozen",
    )  # fmt: skip
    tiers = dict(line.split() for line in frozen.splitlines() if not line.startswith("loss"))
    assert tiers == dict.fromkeys(["feed", "mix", "norm", "norm.vjp"], "persistent")


def test_frozen_run_without_the_pack_fails(tmp_path):
    with pytest.raises(AssertionError, match="no config is stored"):
        run(
            "-m", "tests.offline_program", "run", EJKERNEL_CACHE_DIR=str(tmp_path), EJKERNEL_AUTOTUNE="frozen",
        )  # fmt: skip


def test_specs_make_the_same_calls_again(tmp_path):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), offline_program.shapes())
    lowered = jax.jit(offline_program.step).lower(*abstract)
    found = specs_of(lowered)
    assert {s["op_id"] for s in found} == {"norm", "norm.vjp", "mix", "feed"}
    specs.write(found, tmp_path / "record.json")
    for spec in specs.read(tmp_path / "record.json"):
        inv = specs.from_spec(spec)
        assert inv.key == (spec["device"], spec["op_id"], spec["call_key"])
    feed = next(specs.from_spec(s) for s in found if s["op_id"] == "feed")
    assert feed.kwargs["activation"] is jax.nn.gelu
    selector = ConfigSelectorChain(cache=ConfigCache())
    result = autotune_lowered(selector, lowered.as_text(debug_info=True), specs=tmp_path / "record.json")
    assert {entry.op_id for entry in result} == {s["op_id"] for s in found}


def test_kernels_that_cannot_be_imported_are_reported_by_name(setting):
    selector, executor, _ = setting

    class Local(Plain):
        pass

    lowered = jax.jit(lambda x: executor(Local("local"), x, x)).lower(X)
    found = specs_of(lowered)
    assert "<locals>" in found[0]["kernel"]
    gone = [{**found[0], "kernel": "no_such_package.kernels:Gone"}]
    for listed, message in (
        (found, r"Local cannot be imported: move it"),
        (gone, "no_such_package.kernels:Gone cannot be"),
    ):
        with pytest.warns(UnmatchedCallWarning, match=message):
            result = autotune_lowered(selector, lowered.as_text(debug_info=True), specs=listed)
        assert len(result.unmatched) == 1


def test_kernel_that_changed_since_it_was_recorded_is_reported(setting):
    _, executor, kernel = setting
    lowered = jax.jit(lambda x: executor(kernel, x, x)).lower(X)
    (spec,) = specs_of(lowered)
    with pytest.raises(specs.SpecError, match=r"Record it again\."):
        specs.from_spec({**spec, "args": spec["args"][:1]})


RECORDED = {
    "enum": ((X, recorded_types.Mode.FAST), {}),
    "node": ((recorded_types.Node(X, "a"),), {}),
    "containers": (({"a": [X, (X, None)]},), {"scale": 0.5, "name": "x", "dtype": jnp.bfloat16}),
    "callables": ((X, jnp.sin), {"f": functools.partial(jnp.sum, axis=0)}),
    "random keys": ((X, jax.random.key(0)), {}),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_arguments_are_made_again_in_another_process(name, tmp_path):
    args, kwargs = RECORDED[name]
    executor = Executor(ConfigSelectorChain())
    kernel = recorded_kernels.Anything(mode=recorded_types.Mode.FAST, fn=jnp.cos, size=3)
    inv = executor.explain(kernel, *args, **kwargs).selection.inv
    specs.write([specs.to_spec(inv)], tmp_path / "record.json")
    code = (
        "import sys; from ejkernel.ops.offline import specs\n"
        "(spec,) = specs.read(sys.argv[1]); inv = specs.from_spec(spec)\n"
        "assert inv.kernel.mode.name == 'FAST' and inv.kernel.size == 3\n"
        "print(inv.call_key, inv.args, inv.kwargs, inv.kernel.fn)\n"
    )
    assert inv.call_key in run("-c", code, str(tmp_path / "record.json"))


def test_kernels_with_slots_are_recorded(tmp_path):
    inv = Executor().explain(recorded_kernels.Slotted(3.0), X).selection.inv
    assert specs.from_spec(specs.to_spec(inv)).kernel.power == 3.0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (recorded_types.Act().scaled, "is another object than the one that was passed"),
        (functools.wraps(jnp.sin)(lambda x: x), "is another object than the one that was passed"),
    ],
    ids=["bound method", "wrapper"],
)
def test_callables_that_their_name_does_not_lead_to_are_refused(argument, message):
    inv = Executor().explain(recorded_kernels.Anything(), X, argument).selection.inv
    with pytest.raises(specs.SpecError, match=message):
        specs.to_spec(inv)


def test_recording_never_breaks_the_program(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    (tmp_path / "record.json").write_text('{"ejkernel_record": 1, "calls": [1]}')
    executor = Executor(ConfigSelectorChain())
    np.testing.assert_array_equal(executor(recorded_kernels.Anything(), X), X)
    assert "call 0: must be a dict, got 1" in caplog.text
    (tmp_path / "record.json").unlink()
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), jnp.float32)
    jax.export.export(jax.jit(lambda x: executor(recorded_kernels.Anything(), x)))(shape)
    assert "has a symbolic shape" in caplog.text


def test_backward_that_is_listed_first_is_tuned_after_its_forward(setting):
    selector, executor, kernel = setting
    seen = []

    class Noting(Always):
        def tune(self, inv, kernel, **kwargs):
            seen.append((inv.op_id, inv.metadata.get("forward_cfg")))
            return super().tune(inv, kernel, **kwargs)

    lowered = jax.jit(jax.grad(lambda x: executor(kernel, x, x).sum())).lower(X)
    calls, _ = match(labels_of(lowered), None)
    outcomes = list(tune_each(selector, sorted(calls, key=lambda inv: inv.op_id, reverse=True), Noting()))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert seen == [("harmless", None), ("harmless.vjp", Scale(2))]


def test_one_kernel_that_fails_does_not_cost_the_others_their_tuning(setting):
    selector, executor, kernel = setting

    class Broken(Plain):
        def config_space(self, inv):
            raise ValueError("no space")

    lowered = jax.jit(lambda x: executor(kernel, x, x) + executor(Broken("broken"), x, x)).lower(X)
    with pytest.warns(UnmatchedCallWarning, match="broken .*: ValueError: no space"):
        result = autotune_lowered(selector, lowered)
    assert [entry.op_id for entry in result] == ["harmless"]


def test_candidates_that_are_all_out_are_told_in_the_log(caplog):
    selector = ConfigSelectorChain(tuner=Autotuner(progress=False))
    lowered = jax.jit(lambda x: Executor(selector)(Plain("wrong"), x, x)).lower(X)
    assert len(autotune_lowered(selector, lowered)) == 1
    assert "the guess Scale(factor=1) stays because all other candidates failed or are wrong (1)" in caplog.text


def test_budget_that_ends_before_anything_is_measured_is_not_a_result(setting):
    selector, executor, kernel = setting
    lowered = jax.jit(lambda x: executor(kernel, x, x)).lower(X)
    with pytest.warns(UnmatchedCallWarning, match="stopped before anything was measured"):
        result = autotune_lowered(selector, lowered, tuner=Autotuner(budget_s=0))
    assert len(result) == 0


def test_program_without_labels_is_warned_about(setting):
    selector, executor, kernel = setting
    text = jax.jit(lambda x: executor(kernel, x, x)).lower(X).as_text()
    with pytest.warns(UnmatchedCallWarning, match=r"has no labels.*debug_info=True"):
        assert len(autotune_lowered(selector, text)) == 0


@pytest.mark.parametrize(
    "text", ["", "{}", '{"ejkernel_record": 1, "calls": [{}]}', "[1]", '{"ejkernel_record": 99, "calls": []}', "\x00"]
)
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(specs.SpecError, match=r"record\.json"):
        specs.read(tmp_path / "record.json")
