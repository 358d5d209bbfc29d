"""Wiring: the only module that imports all packages, and gives lower ones the functions of higher ones.

Everything is imported when it is first used: `import ejkernel.ops` stays close to `import jax`.
"""

from __future__ import annotations

from typing import Any

from ejkernel import _compat
from ejkernel.ops import registry
from ejkernel.ops.execution import executor
from ejkernel.ops.utils.services import services


def _record(inv: Any) -> None:
    from ejkernel.ops.offline import specs

    specs.record(inv)


def _make_tuner(tuner: Any) -> Any:
    from ejkernel.ops.tuning.foreign import as_tuner

    return as_tuner(tuner)


def _share_tuner(*tuning: Any) -> Any:
    from ejkernel.ops.processes.shared_tuning import share

    return share(*tuning)


def _prove(*call: Any, **options: Any) -> Any:
    from ejkernel.ops.tuning.proof import prove

    return prove(*call, **options)


def _joint(selector: Any) -> Any:
    if _compat.distributed_client() is None:
        return None
    from ejkernel.ops.processes import agreement, joint

    found = agreement.current()
    return None if found is None else joint.JointSelection(selector, found)


def connect() -> None:
    """Fills in the services."""
    services.run = executor.run_by_default
    services.default_chooser = lambda: executor.default_executor().chooser
    services.traced = registry.traced
    services.record = _record
    services.make_tuner = _make_tuner
    services.share_tuner = _share_tuner
    services.prove = _prove
    services.joint = _joint
