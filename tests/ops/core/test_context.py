"""Overlays and policy overrides are of the task that enters them, and reach only what may depend on them."""

import asyncio
import contextvars
import threading

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import ConfigSelectorChain, Executor, PersistentCache, overlay_cache, policy_override
from ejkernel.ops.core import context
from tests.support import Plain, Scale

X = jnp.ones((3,))


class Setting:
    """A call as users make it: eager, jitted by them once and twice, and jitted anew each time."""

    def __init__(self):
        self.executor, kernel = Executor(ConfigSelectorChain()), Plain()
        self.selector = self.executor.chooser
        self.key = self.executor.explain(kernel, X, X).key
        self.traces = []
        call = lambda x: self.executor(kernel, x, x)
        jitted = jax.jit(lambda x: self.traces.append(1) or call(x))
        outer = jax.jit(lambda x: jitted(x) + 0)
        self.calls = [call, jitted, outer, lambda x: jax.jit(lambda x: call(x))(x)]
        self.choose = lambda: self.executor.choose_config(kernel, X, X).factor

    def factors(self):
        found = {round(float(call(X)[0] / jnp.sin(1.0))) for call in self.calls}
        return found | {self.choose()}


@pytest.fixture
def setting():
    return Setting()


async def _turns(setting, factor, turns):
    found = set()
    await asyncio.sleep(0)
    with overlay_cache({setting.key: Scale(factor)}):
        for _ in range(turns):
            await asyncio.sleep(0)
            found |= setting.factors()
    await asyncio.sleep(0)
    return found, setting.factors()


async def _plain_turns(setting, turns):
    found = set()
    for _ in range(turns):
        await asyncio.sleep(0)
        found |= setting.factors()
    return found


def test_tasks_that_take_turns_keep_their_overlays_apart(setting):
    async def main():
        tasks = [_turns(setting, 2, 2), _turns(setting, 3, 3), _turns(setting, 5, 1), _plain_turns(setting, 4)]
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [({2}, {1}), ({3}, {1}), ({5}, {1}), {1}]
    assert context.current_scope() == context.Scope()
    assert setting.factors() == {1}
    assert len(setting.traces) == 4, "one for each scope, however often the tasks take turns"


def test_tasks_that_take_turns_keep_their_policies_apart(setting):
    async def turns(mode):
        with policy_override(setting.selector, autotune=mode):
            await asyncio.sleep(0)
            found = setting.selector.effective_policy().autotune
            await asyncio.sleep(0)
            return found, setting.selector.effective_policy().autotune

    async def main():
        return await asyncio.gather(turns("record"), turns("frozen"), turns("on"))

    assert asyncio.run(main()) == [(mode, mode) for mode in ("record", "frozen", "on")]
    assert setting.selector.effective_policy().autotune == "off"


def test_task_is_in_the_block_that_it_was_made_in_until_that_is_left(setting):
    async def child(left):
        inside = setting.factors()
        await left.wait()
        return inside, setting.factors()

    async def main():
        left = asyncio.Event()
        with overlay_cache({setting.key: Scale(2)}):
            task = asyncio.create_task(child(left))
            await asyncio.sleep(0)
        left.set()
        return await task

    assert asyncio.run(main()) == ({2}, {1})


def test_blocks_may_be_left_in_any_order(setting):
    first, second = (overlay_cache({setting.key: Scale(factor)}) for factor in (2, 3))
    first.__enter__()
    second.__enter__()
    assert setting.factors() == {3}
    first.__exit__(None, None, None)
    assert setting.factors() == {3}
    second.__exit__(None, None, None)
    assert setting.factors() == {1}


def test_block_that_another_thread_leaves_is_left(setting):
    block = overlay_cache({setting.key: Scale(2)})
    block.__enter__()
    assert setting.factors() == {2}
    (thread := threading.Thread(target=block.__exit__, args=(None, None, None))).start()
    thread.join()
    assert setting.factors() == {1}


def test_block_is_of_the_thread_that_enters_it_whatever_context_another_runs_in(setting):
    found = []
    with overlay_cache({setting.key: Scale(2)}):
        run = contextvars.copy_context().run
        (thread := threading.Thread(target=lambda: found.append(run(setting.factors)))).start()
        thread.join()
        assert setting.factors() == {2}
    assert found == [{1}]


def test_override_of_a_selector_that_nothing_depends_on_has_nothing_traced_again(setting):
    assert setting.factors() == {1}
    traces, other = len(setting.traces), Setting()
    with policy_override(other.selector, autotune="record"):
        assert setting.factors() == {1}
    other.selector.policy = other.selector.policy.__class__(autotune="record")
    assert setting.factors() == {1}
    assert len(setting.traces) == traces


def test_override_counts_for_a_selector_that_first_answers_inside_of_it(setting):
    selector = ConfigSelectorChain(persistent=None)
    executor, seen = Executor(selector), []
    selector.on_event = lambda name, **data: seen.append(name)
    jitted = jax.jit(lambda x: executor(Plain("first.inside"), x, x))
    with policy_override(selector, autotune="record"):
        jitted(X), jitted(X)
    assert seen.count("miss") == 1, "traced once"
    jitted(X), jitted(X)
    assert seen.count("select") == 2, "and once more outside, where the policy is another one"
    with policy_override(selector, autotune="record"):
        jitted(X)
    assert seen.count("select") == 2


def test_put_that_equals_one_of_two_answers_reaches_whoever_has_the_other(monkeypatch):
    invalidated, served = [], context.Served()
    monkeypatch.setattr(context, "invalidate", lambda: invalidated.append(1))
    for factor in (1, 2):
        served.ask("key")
        served.note("key", Scale(factor))
    served.changed("key", Scale(2))
    assert invalidated == [1]


def test_book_that_is_full_has_everyone_ask_again(monkeypatch):
    invalidated, served = [], context.Served()
    monkeypatch.setattr(context, "invalidate", lambda: invalidated.append(1))
    monkeypatch.setattr(context, "MAX_SERVED", 2)
    for key in ("a", "b", "a"):
        served.ask(key)
        served.note(key, Scale(1))
    assert invalidated == []
    served.ask("c")
    assert invalidated == [1]


def test_puts_that_nobody_asks_for_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(context, "MAX_SERVED", 4)
    served = context.Served()
    for n in range(20):
        served.changed(("device", "op", f"{n}"), Scale(n))
    assert len(served._held) <= 4


def test_entry_without_a_signature_has_nothing_traced_again(tmp_path):
    store, traces = PersistentCache(tmp_path), []
    executor, kernel = Executor(ConfigSelectorChain(persistent=store)), Plain()
    jitted = jax.jit(lambda x: traces.append(1) or executor(kernel, x, x))
    device, op_id, call_key = executor.explain(kernel, X, X).key
    jitted(X)
    store.put(device, op_id, "0" * 16, Scale(2))
    store.put("another key", Scale(2))
    jitted(X)
    assert len(traces) == 1
    store.put(device, op_id, call_key, Scale(3))
    assert jitted(X)[0] == pytest.approx(3 * jnp.sin(1.0))
