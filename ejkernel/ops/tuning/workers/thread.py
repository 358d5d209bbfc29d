"""Thread: runs code outside whatever the caller is tracing.

JAX keeps traces, meshes and axis names per thread. In a new one none of them exists, so code runs as if called at top
level, from inside jit, vmap, grad, scan, remat, custom_vjp, shard_map and pmap alike. Options set with `with` are per
thread too; they are captured and entered again, because otherwise a candidate would be compiled for another dtype or
precision.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

from ejkernel import _compat

T = TypeVar("T")


def run_outside(
    fn: Callable[[], T],
    *,
    contexts: Iterable[AbstractContextManager[object]] = (),
    on_interrupt: Callable[[], None] | None = None,
) -> T:
    """Returns `fn()`, run in a separate thread with the JAX options of this one but none of its traces.

    Args:
      fn: What to run. Tracers that it captured cannot be used there.
      contexts: Further contexts to enter, such as JAX user contexts, which cannot be found from outside.
      on_interrupt: Called at the first Ctrl-C, to make `fn` return soon; a second one is raised at once.
    """
    config = _compat.thread_config()
    variables = contextvars.copy_context()
    outcome: Future[T] = Future()

    def inside() -> T:
        with _compat.entered_config(config), contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return fn()

    def body() -> None:
        try:
            outcome.set_result(variables.run(inside))
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it.
            outcome.set_exception(error)

    # A daemon: after a second Ctrl-C a compiler that hangs must not keep the interpreter from ending.
    threading.Thread(target=body, name="ejkernel-outside", daemon=True).start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        if on_interrupt is None or outcome.done():
            raise
        on_interrupt()
        return outcome.result()
