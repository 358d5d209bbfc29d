"""Which tier answers, and that functions which were jitted before notice when the answer changes."""

import gc
import threading
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    EjkernelError,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    get_invocations,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.config.kinds import ConfigClassWarning, misfit
from ejkernel.ops.config.policy import PolicyError
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store.persistent import StoreWarning
from tests.support import Plain, Scale, new_executor

X = jnp.ones((3,)) * 0.5


class Counting(Plain):
    """Shows its config in the result and counts its traces."""

    def __init__(self):
        super().__init__("counting")

    traces = 0

    def run(self, x, *, cfg):
        type(self).traces += 1
        return x * cfg.factor


@pytest.fixture(autouse=True)
def reset():
    Counting.traces = 0


@pytest.fixture
def setting():
    executor, kernel = new_executor(), Counting()
    key = executor.explain(kernel, X).key
    jitted = jax.jit(lambda x: executor(kernel, x))
    factor = lambda: (float(executor(kernel, X)[0] / X[0]), float(jitted(X)[0] / X[0]))
    return executor, kernel, key, factor


def test_tiers_answer_in_the_order_of_the_contract(setting):
    executor, kernel, key, factor = setting
    cache = executor.chooser.cache
    tier = lambda **kw: executor.explain(kernel, X).tier
    assert (tier(), factor()) == ("heuristic", (1, 1))
    cache.put(*key, Scale(2))
    assert (tier(), factor()) == ("memory", (2, 2))
    with overlay_cache({key: Scale(3)}):
        assert (tier(), factor()) == ("overlay", (3, 3))
        with overlay_cache(ConfigCache({key: Scale(4)})):
            assert factor() == (4, 4)
            np.testing.assert_array_equal(executor(kernel, X, cfg=Scale(5)), 5 * X)
        assert factor() == (3, 3)
    assert factor() == (2, 2)


def test_changes_reach_jitted_functions_and_stop_reaching_them(setting):
    executor, _, key, factor = setting
    assert factor() == (1, 1)
    executor.chooser.cache.put(*key, Scale(2))
    assert factor() == (2, 2)
    executor.chooser.cache.put(*key, Scale(3))
    assert factor() == (3, 3)
    executor.chooser.cache.delete(*key)
    assert factor() == (1, 1)
    with overlay_cache({key: Scale(7)}):
        assert factor() == (7, 7)
    assert factor() == (1, 1)


def test_changes_reach_a_jitted_gradient():
    executor, kernel = new_executor(), Plain("grad")
    grad = jax.jit(jax.grad(lambda x: executor(kernel, x, X).sum()))
    before = grad(X)
    executor.chooser.cache.put(*executor.explain(kernel, X, X).key, Scale(2))
    np.testing.assert_allclose(grad(X), 2 * before)


def test_nothing_is_traced_again_without_need(setting):
    executor, _, key, factor = setting
    factor()
    traces = Counting.traces
    executor.chooser.cache.put(*key, Scale(1))
    executor.chooser.cache.put("another", "key", "altogether", Scale(9))
    factor()
    assert Counting.traces == traces
    with overlay_cache({key: Scale(3)}):
        factor()
        inside = Counting.traces
    factor()
    # A mapping with the same contents is the same overlay, however often it is entered.
    with overlay_cache({key: Scale(3)}):
        factor()
    assert Counting.traces == inside


def test_live_overlay_counts_what_is_put_inside_the_block(setting):
    _, _, key, factor = setting
    live = ConfigCache()
    with overlay_cache(live):
        assert factor() == (1, 1)
        live.put(*key, Scale(6))
        assert factor() == (6, 6)
    assert factor() == (1, 1)


def test_overlays_are_of_one_thread_and_cache_changes_of_all(setting):
    executor, _, key, factor = setting
    seen = {}
    run = lambda name: threading.Thread(target=lambda: seen.update({name: factor()}))
    with overlay_cache({key: Scale(3)}):
        (t := run("overlay")).start()
        t.join()
    executor.chooser.cache.put(*key, Scale(4))
    (t := run("cache")).start()
    t.join()
    assert seen == {"overlay": (1, 1), "cache": (4, 4)}


def test_heuristic_and_explicit_configs_are_never_stored(setting):
    executor, kernel, _, factor = setting
    factor()
    executor(kernel, X, cfg=Scale(8))
    executor.compile(kernel, X)
    assert len(executor.chooser.cache) == 0
    assert factor() == (1, 1)


class Halving:
    """A tuner that takes the last candidate and remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def autotune(self, make_fn, args, kwargs, candidates):
        candidates = list(candidates)
        self.calls.append((args, kwargs, candidates))
        for cfg in candidates:
            make_fn(cfg)
        return candidates[-1]


def test_autotune_asks_the_tuner_once_and_remembers():
    tuner = Halving()
    executor, kernel = new_executor(autotune=True, tuner=tuner), Counting()
    for _ in range(3):
        np.testing.assert_array_equal(executor(kernel, X), 2 * X)
    np.testing.assert_array_equal(jax.jit(lambda x: executor(kernel, x))(X), 2 * X)
    assert len(tuner.calls) == 1
    assert executor.explain(kernel, X).tier == "memory"


class ByAxes(Kernel):
    """Configs that are dicts, and a space that is written as axes."""

    def run(self, x, *, cfg):
        return cfg["factor"] * x

    def heuristic_cfg(self, inv):
        return {"factor": 1}

    def config_space(self, inv):
        return {"factor": (1, 2, 3), "small": lambda cfg: cfg["factor"] < 3}


def test_tuner_is_given_the_configs_that_axes_stand_for():
    tuner = Halving()
    np.testing.assert_array_equal(new_executor(autotune=True, tuner=tuner)(ByAxes(), X), 2 * X)
    assert tuner.calls[0][2] == [{"factor": 1}, {"factor": 2}]


def test_dict_from_a_neighbouring_shape_serves_if_it_lies_on_the_axes(tmp_path):
    class Repeated(ByAxes):
        def run(self, x, *, cfg):
            return sum([x] * cfg["factor"]) / cfg["factor"]

    store, kernel = PersistentCache(tmp_path), Repeated()
    executor, tuned = Executor(ConfigSelectorChain(persistent=store)), Invocation(kernel=kernel, args=(X,))
    store.put(*tuned.key, {"factor": 2}, signature=tuned.signature)
    assert executor.choose_config(kernel, X[:-1]) == {"factor": 2}
    store.put(*tuned.key, {"another": 2}, signature=tuned.signature)
    assert executor.choose_config(kernel, X[:-1]) == {"factor": 1}


def test_eager_call_tunes_on_its_own_arguments_and_traced_call_on_data_of_its_shapes():
    tuner = Halving()
    executor, kernel = new_executor(autotune=True, tuner=tuner), Counting()
    executor(kernel, X)
    np.testing.assert_array_equal(tuner.calls[0][0][0], X)
    jax.jit(lambda x: executor(kernel, x))(jnp.ones((5,)))
    (made,) = tuner.calls[1][0]
    assert (made.shape, made.dtype) == ((5,), jnp.float32)
    assert not isinstance(made, jax.core.Tracer)
    assert len(set(made.tolist())) > 1
    assert executor.choose_config(kernel, jnp.ones((6,))) == Scale(2)
    np.testing.assert_array_equal(tuner.calls[2][0][0], jnp.ones((6,)))


def test_selector_without_a_tuner_has_the_default_one():
    executor = new_executor(autotune=True)
    kernel = Plain("tuned by default")
    np.testing.assert_allclose(executor(kernel, X, X), jnp.sin(X) * X, rtol=1e-6)
    assert executor.explain(kernel, X, X).tier == "memory"


def test_policy_override_changes_the_policy_of_one_or_all(setting):
    executor, kernel, _, factor = setting
    other = new_executor()
    assert factor() == (1, 1)
    with policy_override(autotune="frozen"):
        for call in (lambda: executor(kernel, X), lambda: other(kernel, X), lambda: factor()):
            with pytest.raises(ConfigNotFoundError, match=r'counting: no config is stored .* "frozen"'):
                call()
        with policy_override(executor.chooser, autotune=False):
            assert factor() == (1, 1)
            with pytest.raises(ConfigNotFoundError):
                other(kernel, X)
    assert factor() == (1, 1)


def test_setting_the_policy_reaches_jitted_functions(setting):
    executor, _, key, factor = setting
    assert factor() == (1, 1)
    executor.chooser.policy = AutotunePolicy(autotune="frozen")
    with pytest.raises(ConfigNotFoundError):
        factor()
    executor.chooser.cache.put(*key, Scale(2))
    assert factor() == (2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutotunePolicy(autotune="maybe"), "autotune must be one of 'off', 'on', 'record', 'frozen' or a bool"),
        (lambda: AutotunePolicy(stale="old"), "stale must be one of 'use', 'retune', 'ignore', got 'old'"),
        (lambda: AutotunePolicy(transfer=1), "transfer must be True or False, got 1"),
        (lambda: policy_override(tune=True), "unknown field 'tune'; the fields are autotune, transfer, stale"),
        (lambda: policy_override(autotune="maybe"), "got 'maybe'"),
    ],
)
def test_unknown_policy_values_list_the_known_ones(make, message):
    with pytest.raises(PolicyError, match=message):
        make()


def test_bools_are_shorthand():
    assert AutotunePolicy(autotune=True) == AutotunePolicy(autotune="on")
    assert ConfigSelectorChain(ConfigCache(), autotune=True).policy.autotune == "on"
    assert ConfigSelectorChain(cache=ConfigCache()).policy == AutotunePolicy(autotune=False)


@pytest.mark.parametrize("make", [Executor, lambda: Executor(ConfigSelectorChain(ConfigCache()))], ids=["", "chain"])
def test_environment_sets_the_policy_where_nobody_else_does(make, monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "frozen")
    with pytest.raises(ConfigNotFoundError):
        make()(Counting(), X)
    for chain in (ConfigSelectorChain(autotune=False), ConfigSelectorChain(policy=AutotunePolicy())):
        np.testing.assert_array_equal(Executor(chain)(Counting(), X), X)
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "sometimes")
    with pytest.raises(EjkernelError, match="'sometimes' is not one of"):
        make()


def test_executor_without_a_selector_has_the_tiers_of_the_default_one():
    key = Executor().explain(Counting(), X).key
    PersistentCache().put(*key, Scale(3))
    np.testing.assert_array_equal(Executor()(Counting(), X), 3 * X)


def test_environment_sets_the_default_executors_policy(monkeypatch):
    from ejkernel.errors import EjkernelError
    from ejkernel.ops import default_executor, set_default_executor

    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "frozen")
    with pytest.raises(ConfigNotFoundError):
        Counting()(X)
    set_default_executor(None)
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "sometimes")
    with pytest.raises(EjkernelError, match="EJKERNEL_AUTOTUNE: 'sometimes' is not one of 'off', 'on'"):
        default_executor()


def test_events_tell_what_happened():
    events = []
    executor = new_executor(
        on_event=lambda name, **data: events.append((name, data["tier"] if name == "select" else None))
    )
    kernel = Counting()
    executor(kernel, X)
    executor(kernel, X)
    assert events == [("select", "heuristic")]
    with policy_override(autotune="record"):
        executor(kernel, X)
    assert events[1:] == [("miss", None), ("select", "heuristic")]


def test_events_carry_the_key():
    seen = []
    executor, kernel = new_executor(on_event=lambda name, **data: seen.append(data)), Counting()
    executor(kernel, X)
    assert (seen[0]["device"], seen[0]["op_id"], seen[0]["call_key"]) == executor.explain(kernel, X).key
    assert seen[0]["cfg"] == Scale(1)


def test_explain_shows_what_every_tier_holds_and_changes_nothing(setting):
    executor, kernel, key, _ = setting
    executor.chooser.cache.put(*key, Scale(2))
    with overlay_cache({key: Scale(3)}), policy_override(autotune="on"):
        explanation = executor.explain(kernel, X)
    held = {tier.name: tier.cfg for tier in explanation.selection.tiers}
    assert held == {"overlay": Scale(3), "memory": Scale(2), "autotune": None, "heuristic": Scale(1)}
    assert (explanation.tier, explanation.cfg, explanation.key) == ("overlay", Scale(3), key)
    assert (explanation.platform, explanation.method) == ("xla", "run")
    for text in (key[2], "from overlay", "Scale(factor=2)", "would measure"):
        assert text in str(explanation)


def test_anything_with_choose_can_replace_the_selector():
    class Always:
        def choose(self, inv, kernel):
            return Scale(4)

    executor = Executor(Always())
    np.testing.assert_array_equal(executor(Counting(), X), 4 * X)
    assert executor.choose_config(Counting(), X) == Scale(4)
    assert executor.explain(Counting(), X).tier == "Always"
    with pytest.raises(TypeError, match=r"needs choose\(inv, kernel\), got int"):
        Executor(3)


def test_put_reaches_a_function_that_an_overlay_had_answered_meanwhile(setting):
    executor, _, key, factor = setting
    executor.chooser.cache.put(*key, Scale(2))
    assert factor() == (2, 2)
    with overlay_cache({key: Scale(5)}):
        assert factor() == (5, 5)
    executor.chooser.cache.put(*key, Scale(5))
    assert factor() == (5, 5)


def test_put_during_a_lookup_is_not_lost():
    class Racing(ConfigCache):
        """Another thread's put lands right after the lookup."""

        def get(self, *key):
            found = super().get(*key)
            if found is None and not getattr(self, "done", False):
                self.done = True
                (thread := threading.Thread(target=self.put, args=(*key, Scale(9)))).start()
                thread.join()
            return found

    executor, kernel = Executor(ConfigSelectorChain(Racing())), Counting()
    executor(kernel, X)
    np.testing.assert_array_equal(executor(kernel, X), 9 * X)


def test_configs_with_arrays_and_mutable_parts_are_compared_by_content():
    class Table(Plain):
        def run(self, x, *, cfg):
            return x * float(cfg["table"][0])

        def heuristic_cfg(self, inv):
            return {"table": np.array([1.0])}

    executor, kernel = new_executor(), Table("table")
    key = executor.explain(kernel, X).key
    for value in (2.0, 2.0, 3.0):
        executor.chooser.cache.put(*key, {"table": np.array([value])})
        np.testing.assert_array_equal(executor(kernel, X), value * X)


def test_tuned_config_that_is_not_data_stays_in_memory_with_a_warning(tmp_path):
    class Opaque:
        def __init__(self, factor):
            self.factor = factor

    class Kernel(Counting):
        def heuristic_cfg(self, inv):
            return Opaque(1)

        def config_space(self, inv):
            return [Opaque(2)]

    executor = new_executor(autotune=True, tuner=Halving(), persistent=PersistentCache(tmp_path))
    with pytest.warns(StoreWarning, match="counting: the tuned config stays in memory"):
        np.testing.assert_array_equal(executor(Kernel(), X), 2 * X)
    np.testing.assert_array_equal(executor(Kernel(), X), 2 * X)


def test_explain_says_that_a_frozen_policy_raises(setting):
    executor, kernel, _, _ = setting
    with policy_override(autotune="frozen"):
        explanation = executor.explain(kernel, X)
    assert (explanation.tier, explanation.cfg) == ("frozen", None)
    assert "raises; the guess would be Scale(factor=1)" in str(explanation)


def test_explicit_config_can_be_explained_and_compiled(setting):
    executor, kernel, _, _ = setting
    assert executor.explain(kernel, X, cfg=Scale(4)).tier == "explicit"
    assert executor.choose_config(kernel, X, cfg=Scale(4)) == Scale(4)
    np.testing.assert_array_equal(executor.compile(kernel, X, cfg=Scale(4))(X), 4 * X)


def test_policy_override_refuses_what_has_no_policy(setting):
    with pytest.raises(PolicyError, match=r"got Executor\. An executor's selector is its \.chooser"):
        policy_override(setting[0], autotune=False)


def test_replacing_the_default_executor_reaches_jitted_functions():
    from ejkernel.ops import set_default_executor

    kernel = Counting()
    f = jax.jit(lambda x: kernel(x))
    np.testing.assert_array_equal(f(X), X)
    other = new_executor()
    other.chooser.cache.put(*other.explain(kernel, X).key, Scale(6))
    set_default_executor(other)
    np.testing.assert_array_equal(f(X), 6 * X)


@pytest.mark.parametrize("style", ["plain", "custom_vjp"])
def test_data_that_a_call_was_tuned_on_is_not_kept(style):
    from tests.support import CustomVjp

    executor = new_executor(autotune=True, tuner=Halving())
    executor.chooser.tuner.calls = _Forgetful()
    x = jnp.ones((64,)) * 2
    ref = weakref.ref(x)
    executor({"plain": Plain, "custom_vjp": CustomVjp}[style](f"kept {style}"), x, x)
    del x
    gc.collect()
    assert ref() is None


class _Forgetful:
    def append(self, item):
        pass


def test_config_of_a_class_that_was_defined_anew_is_not_served():
    def cell(fields):
        scope = {"Kernel": Kernel, "jax": jax, "dataclass": dataclass, "__name__": "cell"}
        exec(
            f"@dataclass(frozen=True)\nclass Cfg:\n    {fields}\n"
            "class Cell(Kernel[Cfg, jax.Array]):\n"
            "    def run(self, x, *, cfg):\n        assert isinstance(cfg, Cfg)\n        return x * cfg.n\n"
            "    def heuristic_cfg(self, inv): return Cfg()",
            scope,
        )
        return scope["Cell"](), scope["Cfg"]

    executor = new_executor()
    first, cfg = cell("n: int = 1")
    executor.chooser.cache.put(*executor.explain(first, X).key, cfg(3))
    np.testing.assert_array_equal(executor(first, X), 3 * X)
    second, _ = cell("n: int = 2; more: int = 0")
    np.testing.assert_array_equal(executor(second, X), 2 * X)
    assert "Cfg was defined again since" in str(executor.explain(second, X))


class Rows(NamedTuple):
    warps: int = 4


class Stranger(Kernel[Rows, jax.Array]):
    """Another library's kernel of the same name."""

    def run(self, x, *, cfg):
        return x * cfg.warps

    def heuristic_cfg(self, inv):
        return Rows()


def put_in_memory(executor, key, cfg):
    executor.chooser.cache.put(*key, cfg)
    return nullcontext()


def put_on_disk(executor, key, cfg):
    executor.chooser.persistent.put(*key, cfg)
    return nullcontext()


PLACES = {
    "overlay": lambda executor, key, cfg: overlay_cache({key: cfg}),
    "memory": put_in_memory,
    "persistent": put_on_disk,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("untyped", [False, True], ids=["typed", "untyped"])
def test_config_of_another_class_counts_as_absent(place, untyped, tmp_path):
    executor, kernel = new_executor(persistent=PersistentCache(tmp_path)), Stranger("counting")
    if untyped:
        kernel.__class__ = type("Untyped", (Stranger,), {"cfg_type": None})
    key = executor.explain(kernel, X).key
    with PLACES[place](executor, key, Scale(3)):
        pattern = r"Scale.*Rows.*(counts as absent|another name)"
        if place == "persistent" and not untyped:
            expected = pytest.warns(StoreWarning, match=r"Rows.*absent")  # Its fields do not even fit.
        else:
            expected = pytest.warns(ConfigClassWarning, match=pattern)
        with expected:
            np.testing.assert_array_equal(executor(kernel, X), 4 * X)
        np.testing.assert_array_equal(jax.jit(lambda x: executor(kernel, x))(X), 4 * X)
        assert executor.explain(kernel, X).tier == "heuristic"


@dataclass(frozen=True)
class OtherScale:
    """The same fields as `Scale`: on disk only the name of the class tells them apart."""

    factor: int = 1


@pytest.mark.parametrize("name", ["tests.support:Scale", "elsewhere.kernels:Scale"], ids=["loaded", "not loaded"])
def test_stored_config_of_another_class_with_equal_fields_counts_as_absent(name, tmp_path):
    class Twin(Stranger):
        cfg_type = OtherScale

        def run(self, x, *, cfg):
            return x * cfg.factor

        def heuristic_cfg(self, inv):
            return OtherScale()

    store = PersistentCache(tmp_path)
    executor, kernel = new_executor(persistent=store), Twin("counting")
    entry = entries.make(executor.explain(kernel, X).key, Scale(3))
    store.add(replace(entry, cfg_data={**entry.cfg_data, "type": name}, _typed={}))
    with pytest.warns(ConfigClassWarning, match=rf"{name.replace(':', '.')}.*takes a .*OtherScale"):
        np.testing.assert_array_equal(executor(kernel, X), X)
    # One that was renamed in its own package is still the kernel's own.
    own = f"{OtherScale.__module__.partition('.')[0]}.before:Scale"
    PersistentCache(tmp_path).add(replace(entry, cfg_data={**entry.cfg_data, "type": own}, _typed={}))
    np.testing.assert_array_equal(new_executor(persistent=store)(kernel, X), 3 * X)


def test_two_kernels_with_one_op_id_are_told_of():
    executor = new_executor()
    executor(Counting(), X)
    with pytest.warns(ConfigClassWarning, match=r"counting: .*Stranger and .*Counting are two kernels with one op id"):
        executor(Stranger("counting"), X)
    executor(Stranger("another"), X)


def test_common_base_without_anything_to_run_makes_no_family():
    class Base(Kernel[Scale, jax.Array]):
        def heuristic_cfg(self, inv):
            return Scale()

    executor = new_executor()
    run = lambda self, x, *, cfg: x
    executor(type("First", (Base,), {"run": run})("same"), X)
    with pytest.warns(ConfigClassWarning, match="two kernels with one op id"):
        executor(type("Second", (Base,), {"run": run})("same"), X)


def test_variants_of_one_kernel_may_share_its_op_id():
    executor = new_executor()
    for cls in (Counting, type("Variant", (Counting,), {}), type("Sibling", (Counting,), {})):
        np.testing.assert_array_equal(executor(cls(), X), X)


@pytest.mark.parametrize("call", [Executor.__call__, Executor.choose_config, Executor.explain, Executor.compile])
@pytest.mark.parametrize("cfg", [Rows(3), 128, {"factor": 3}, Scale], ids=["class", "number", "dict", "type"])
def test_explicit_config_of_another_class_is_refused(call, cfg):
    with pytest.raises(EjkernelError, match=r"counting: cfg must be a tests\.support\.Scale, got "):
        call(new_executor(), Counting(), X, cfg=cfg)


HINTS = [
    (dict[str, int], {"a": 1}, [1]),
    (Mapping[str, int], {"a": 1}, [1]),
    (int | str, "a", 1.5),
    (float, 1, "a"),
    (Annotated[int, "warps"], 1, "a"),
]


@pytest.mark.parametrize(("hint", "fits", "other"), HINTS, ids=lambda x: str(x))
def test_config_is_held_to_any_type_that_can_be_checked(hint, fits, other):
    class Hinted(Kernel):
        cfg_type = hint

        def run(self, x, *, cfg):
            return x

    inv = Invocation(kernel=Hinted("hinted"), args=(X,))
    assert misfit(inv, inv.kernel, fits) is None
    assert misfit(inv, inv.kernel, other) is not None


@pytest.mark.parametrize("hint", [None, Any, Literal["a"], TypeVar("T"), object], ids=str)
def test_kernel_that_says_nothing_about_its_configs_takes_any(hint):
    class Silent(Kernel):
        cfg_type = hint

        def run(self, x, *, cfg):
            return cfg * x

    executor, kernel = new_executor(), Silent("silent")
    np.testing.assert_array_equal(executor(kernel, X, cfg=3), 3 * X)


def test_config_that_is_changed_in_place_and_put_again_reaches_jitted_functions():
    @dataclass
    class Mutable:
        factor: int = 1

    class Guessing(Counting):
        def heuristic_cfg(self, inv):
            return Mutable()

    executor, kernel = new_executor(), Guessing()
    key, cfg = executor.explain(kernel, X).key, Mutable(2)
    executor.chooser.cache.put(*key, cfg)
    np.testing.assert_array_equal(executor(kernel, X), 2 * X)
    cfg.factor = 5
    executor.chooser.cache.put(*key, cfg)
    np.testing.assert_array_equal(executor(kernel, X), 5 * X)


def test_record_policy_records_the_miss(setting):
    executor, kernel, key, _ = setting
    with policy_override(autotune="record"):
        executor(kernel, X)
    assert get_invocations()["counting"].keys() == {key[2]}
    executor.chooser.cache.put(*executor.explain(kernel, X[:2]).key, Scale(2))
    with policy_override(autotune="record"):
        executor(kernel, X[:2])
    assert len(get_invocations()["counting"]) == 1


@pytest.mark.parametrize(
    "options", [{"policy": "on"}, {"cache": 5}, {"persistent": "/tmp/x"}, {"tuner": 5}, {"on_event": "print"}], ids=str
)
def test_parts_of_a_selector_are_checked_at_once(options):
    ((name, value),) = options.items()
    with pytest.raises(EjkernelError, match=rf"ConfigSelectorChain: {name} must be .* or None, got {value!r}"):
        ConfigSelectorChain(**options)


@pytest.mark.parametrize("part", [threading.Lock(), jax, jnp.ones(2)], ids=["lock", "module", "array"])
def test_config_may_hold_what_cannot_be_copied(part):
    @dataclass(frozen=True)
    class Holding:
        part: object
        factor: int = 3

    class Guessing(Counting):
        def heuristic_cfg(self, inv):
            return Holding(None)

    executor, kernel = new_executor(), Guessing()
    executor.chooser.cache.put(*executor.explain(kernel, X).key, Holding(part))
    np.testing.assert_array_equal(executor(kernel, X), 3 * X)
    np.testing.assert_array_equal(jax.jit(lambda x: executor(kernel, x))(X), 3 * X)
