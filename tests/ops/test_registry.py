import collections
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    Invocation,
    Kernel,
    device_fingerprint,
    find_labels_in_lowered,
    get_invocations,
    labels_to_configs,
    record_invocation,
    registry,
)
from ejkernel.ops.core import context
from ejkernel.ops.execution import program
from ejkernel.ops.execution.parts import Part
from ejkernel.ops.offline import specs
from tests.recorded_kernels import Anything as Recorded
from tests.support import OwnBackward, Plain, Scale, new_executor

X = jnp.ones((3, 2))
SHAPE = jax.ShapeDtypeStruct((3, 2), jnp.float32)


def test_explicit_record_is_found_by_op_and_key():
    kernel = Plain()
    inv = Invocation(kernel=kernel, args=(X, X), kwargs={"scale": 1.0})
    record_invocation(kernel, inv)
    want = {kernel.op_id: {inv.call_key: (kernel, (SHAPE, SHAPE), {"scale": 1.0})}}
    assert get_invocations() == get_invocations(device_fingerprint()) == get_invocations(jax.devices()[0]) == want
    assert get_invocations("another device") == {}


def test_calls_are_recorded_only_on_request(monkeypatch):
    executor, kernel = new_executor(), Plain()
    executor(kernel, X, X)
    assert get_invocations() == {}
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    jax.jit(lambda x: executor(kernel, x, x))(jnp.ones((5,)))
    recorded = get_invocations()[kernel.op_id]
    assert len(recorded) == 2
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "0")
    # What ran while recording was on stays recorded.
    assert [args[0].shape for _, args, _ in get_invocations()[kernel.op_id].values()] == [(5,)]


def test_unknown_value_of_the_switch_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "yes")
    with pytest.raises(ValueError, match="EJKERNEL_OPS_RECORD: 'yes' is not one of '0', '1'"):
        new_executor()(Plain(), X, X)


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "vmap"])
def test_what_is_recorded_is_abstract(monkeypatch, how):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, kernel = new_executor(), OwnBackward()
    f = lambda x: executor(kernel, x, x).sum()
    {"eager": f, "jit": jax.jit(f), "grad": jax.grad(f), "vmap": jax.vmap(f)}[how](X)
    calls = get_invocations()
    assert set(calls) == {kernel.op_id} | ({f"{kernel.op_id}.vjp"} if how == "grad" else set())
    for _, args, kwargs in calls[kernel.op_id].values():
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, kwargs)))


def test_no_array_and_no_tracer_outlives_the_call(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, kernel, tracers = new_executor(), Plain(), []
    x = jnp.ones((4, 4)) * 2
    alive = weakref.ref(x)

    def f(x):
        tracers.append(weakref.ref(x))
        return executor(kernel, x, x)

    executor(kernel, x, x)
    jax.jit(f)(x)
    record_invocation(kernel, Invocation(kernel=kernel, args=(x, x)))
    del x
    gc.collect()
    assert alive() is None
    assert [t() for t in tracers] == [None]


class GroupSizes(Kernel[Scale, jax.Array]):
    record_integers = True

    def run(self, x, sizes, *, cfg):
        return x * sizes.sum()

    def heuristic_cfg(self, inv):
        return Scale()


def test_small_integers_are_kept_if_the_kernel_asks(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, sizes = new_executor(), jnp.array([1, 2])
    for _ in range(2):
        executor(GroupSizes(), X, sizes)
    jax.jit(lambda s: executor(GroupSizes(), X, s))(sizes)
    ((_, (x, kept), _),) = get_invocations()[GroupSizes().op_id].values()
    assert isinstance(x, jax.ShapeDtypeStruct)
    assert isinstance(kept, np.ndarray)
    np.testing.assert_array_equal(kept, sizes)


def test_large_integers_are_not_kept(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    new_executor()(GroupSizes(), X, jnp.zeros(registry.SMALL_INTEGERS + 1, jnp.int32))
    ((_, (_, kept), _),) = get_invocations()[GroupSizes().op_id].values()
    assert isinstance(kept, jax.ShapeDtypeStruct)


# --- What stays alive ---


class Holds(Plain):
    """A kernel that holds an array, or anything else."""

    def __init__(self, held, name="holds"):
        super().__init__(name)
        self.held = held

    def run(self, x, *, cfg):
        return x * sum(jax.tree.leaves(self.held))


class HoldsOwnVjp(Holds):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * sum(jax.tree.leaves(self.held)),)


@pytest.mark.parametrize("cls", [Holds, HoldsOwnVjp])
def test_no_kernel_and_no_array_of_it_outlives_its_user(cls):
    executor = new_executor()

    def use(kernel):
        x, call = jnp.ones(5), lambda x: executor(kernel, x)
        call(x), jax.jit(call)(x), jax.grad(lambda x: call(x).sum())(x), jax.vmap(call)(x[None])
        return weakref.ref(kernel), weakref.ref(kernel.held)

    gone, array = use(cls(jnp.ones(5) * 2))
    gc.collect()
    assert gone() is None
    gc.collect()  # Its programs, which went with it, are a circle.
    assert array() is None


def test_no_tracer_that_a_kernel_holds_is_left_behind():
    executor = new_executor()
    with jax.checking_leaks():
        jax.jit(lambda x, w: executor(Holds(w), x))(X, X)
        jax.jit(jax.grad(lambda x, w: executor(Holds([w]), x).sum()))(X, X)
        jax.vmap(lambda x, w: executor(Holds(w), x))(X, X)


def test_no_tracer_that_a_recorded_kernel_holds_is_left_behind(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor = new_executor()
    with jax.checking_leaks():
        jax.jit(lambda x, w: executor(Holds(w), x))(X, X)
    assert get_invocations() == {}


class HoldsData(Holds):
    run = Plain.run


def test_kernel_of_plain_data_is_kept_so_that_its_call_can_be_tuned_later():
    data = ((1, 2), {"a": 3.0}, [None, "x", jnp.float32], frozenset({1}), Scale(2), lambda x, n=3: x * n)
    executor, kept = new_executor(), {}
    for place, held in enumerate(data):
        kernels, x = [HoldsData(held)], jnp.ones((3 + place, 2))
        key = executor.explain(kernels[0], x, x).key
        jax.jit(lambda x: executor(kernels[0], x, x)).lower(x)  # noqa: B023
        kept[key] = weakref.ref(kernels.pop())
    gc.collect()
    assert len(kept) == len(data)
    assert all(registry.traced(*key[1:]).kernel is kernel() is not None for key, kernel in kept.items())


def test_call_whose_kernel_is_gone_is_told_apart_from_one_that_was_never_made():
    executor = new_executor()
    label = find_labels_in_lowered(jax.jit(lambda x: executor(Holds(jnp.ones(3)), x)).lower(jnp.ones(3)))
    gc.collect()
    with pytest.raises(registry.KernelGoneError, match=r"holds: the kernel .* is gone\. One that holds arrays"):
        labels_to_configs(label)
    assert registry.traced("holds", "0" * 16) is None


def test_recorded_kernel_is_kept_until_it_is_tuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    new_executor()(Holds(jnp.ones(3)), jnp.ones(3))
    gc.collect()
    ((kernel, _, _),) = get_invocations()["holds"].values()
    np.testing.assert_array_equal(kernel.held, jnp.ones(3))


def test_traced_calls_are_bounded_and_recorded_ones_stay(monkeypatch):
    """10 000 shapes, each of its own kernel; the tables are what grows, so nothing is compiled."""
    abstract = lambda n: (jax.ShapeDtypeStruct((n,), jnp.float32),)
    first = Invocation(kernel=Plain("first"), args=abstract(1))
    record_invocation(first.kernel, first)
    for n in range(10_000):
        kernel = Plain(f"kernel{n}")
        registry.note_traced(kernel, Invocation(kernel=kernel, args=abstract(n)))
    assert len(registry._traced) == registry.MAX_TRACED
    assert registry.traced("kernel9999", Invocation(kernel=kernel, args=abstract(9_999)).call_key).kernel is kernel
    assert list(get_invocations()) == ["first"]
    assert sum(isinstance(x, Plain) for x in gc.get_objects()) <= registry.MAX_TRACED + 100


def test_programs_of_many_kernels_are_bounded(monkeypatch):
    monkeypatch.setattr(program, "MAX_VARIANTS", 20)
    executor, kept = new_executor(), []
    # Kernels that share no programs; held, so that only the bound can free anything.
    kept = [HoldsOwnVjp([n]) for n in range(50)] + [Holds(n, f"op{n}") for n in range(50)]
    for kernel in kept:
        jax.eval_shape(lambda x: executor(kernel, x), X)  # noqa: B023
    gc.collect()
    assert max(len(executor._own), len(executor._shared)) <= 20
    np.testing.assert_array_equal(executor(kept[3], X), 3 * X)


@pytest.mark.parametrize(("many", "bound"), [(60, 16), pytest.param(10_000, 4096, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("what", ["shapes", "kernels"])
def test_a_long_life_with_ever_new_calls_is_held_in_bounded_memory(monkeypatch, what, many, bound):
    for module, name in ((program, "MAX_TRACES"), (program, "MAX_VARIANTS"), (registry, "MAX_TRACED")):
        monkeypatch.setattr(module, name, bound)
    executor, count = new_executor(), collections.Counter()
    kinds = (Part, Invocation, program.Program, Holds)
    living = lambda: collections.Counter(type(x) for x in gc.get_objects() if isinstance(x, kinds))
    gc.collect()
    before = living()
    for n in range(many):
        kernel, x = (Holds(2), np.ones(n + 1)) if what == "shapes" else (Holds(2, f"op{n}"), np.ones(1))
        jax.eval_shape(lambda x: executor(kernel, x), x)  # noqa: B023
        if n % bound == bound - 1:
            gc.collect()
            count |= living() - before
    # A call is held by its equations, and by the registry; as many again may be about to go.
    assert max(count.values()) <= 3 * bound + 10, count


def test_answers_are_bounded_and_changes_reach_those_that_were_forgotten(monkeypatch):
    monkeypatch.setattr(context, "MAX_SERVED", 4)
    executor, kernel = new_executor(), Plain()
    call = jax.jit(lambda x: executor(kernel, x, x))
    before, key = call(X), executor.explain(kernel, X, X).key
    for n in range(1, 8):
        jax.eval_shape(lambda x: executor(kernel, x, x), jnp.ones(n))
    cache = executor.chooser.cache
    assert len(cache.served._answers) <= 4
    cache.put(*key, Scale(5))
    np.testing.assert_array_equal(call(X), 5 * before)


def test_recording_reads_its_file_once_however_many_calls_there_are(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    reads, writes = [], []
    monkeypatch.setattr(specs, "read", lambda path, read=specs.read: reads.append(path) or read(path))
    monkeypatch.setattr(specs, "write", lambda s, path, write=specs.write: writes.append(path) or write(s, path))
    kernel = Recorded()
    for n in range(40):
        registry.note_traced(kernel, Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((n,), jnp.float32),)))
    assert (len(reads), len(writes)) == (0, 1)
    assert [c["args"][0]["shape"] for c in specs.read(specs.record_path())] == [[n] for n in range(40)]


def test_record_of_an_earlier_version_grows_and_outlives_a_line_that_was_cut_off(tmp_path, caplog):
    spec = lambda n: specs.to_spec(Invocation(kernel=Recorded(), args=(jax.ShapeDtypeStruct((n,), jnp.float32),)))
    sizes = lambda: sorted(c["args"][0]["shape"][0] for c in specs.read(path))
    path = tmp_path / "record.json"
    specs.write([spec(1), spec(2)], path)
    for n in (2, 3, 3, 4):
        specs.add([spec(n)], path)
    assert sizes() == [1, 2, 3, 4]
    assert path.read_bytes().count(b"\n{") == 2, "a line for each new call"
    with path.open("ab") as file:
        file.write(b'{"device": "cu')
    assert sizes() == [1, 2, 3, 4]
    assert "not written to its end" in caplog.text
    specs.add([spec(5)], path)
    assert sizes() == [1, 2, 3, 4, 5]
    path.unlink()
    specs.add([spec(5)], path)
    assert sizes() == [5]
