"""Services: functions of higher packages that lower ones need; `ejkernel.ops.wiring` fills them in.

Imports point one way, from higher packages to lower ones. If a kernel must run itself, or a selector must measure, it
calls a function from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Services:
    """One attribute per function. They are set as soon as `ejkernel.ops` is imported."""

    executor: Any = None
    """The default executor; None until there is one."""
    run: Callable[..., Any]
    """`run(kernel, cfg, args, kwargs)` runs a kernel through the default executor."""
    default_chooser: Callable[[], Any]
    """The chooser of the default executor."""
    traced: Callable[[str, str], Any]
    """`traced(op_id, call_key)` is the call of that identity that was traced in this process; None if there is none."""
    record: Callable[[Any], None]
    """`record(inv)` writes a call into the record file."""
    make_tuner: Callable[[Any], Any]
    """`make_tuner(tuner)` is the tuner of a selector that was given `tuner`, or None."""
    share_tuner: Callable[..., Any]
    """`share_tuner(tuner, kernel, policy, agreement, place, claim)`: the tuner to use when all processes measure."""
    prove: Callable[..., Any]
    """`prove(inv, kernel, cfg, store, now=)`: whether a config of another call may be used for `inv`; `reason` if not.

    Without `now` nothing is run: None if it is not known yet.
    """
    joint: Callable[[Any], Any]
    """`joint(selector)` chooses together with the other processes; None if there are none."""


services = Services()
