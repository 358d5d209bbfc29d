"""Every error and warning of ejkernel, importable from here; catch `EjkernelError` to catch all errors.

Each is defined beside what raises it, and looked up there when it is first asked for: this module imports nothing.
"""

import importlib
from typing import Any


class EjkernelError(Exception):
    """Base class of ejkernel's own errors."""


_HOMES = {
    "cli.arguments": ("ArgumentTextError",),
    "cli.jax_start": ("BackendStartError",),
    "cli.operations": ("OperationError",),
    "kernels.flash_attention.arguments": ("AttentionArgumentError",),
    "kernels.flash_attention.reference": ("ReferenceTooLargeError",),
    "ops.config.agreement": ("DecisionError",),
    "ops.config.cache": ("CacheKeyError",),
    "ops.config.entry": ("EntryError",),
    "ops.config.joint": ("JointTuningWarning",),
    "ops.config.kinds": ("ConfigClassError", "ConfigClassWarning"),
    "ops.config.packs": ("PackError",),
    "ops.config.persistent": ("StoreSettingError",),
    "ops.config.policy": ("PolicyError",),
    "ops.config.selection": ("ConfigNotFoundError", "SymbolicCallWarning"),
    "ops.config.store_files": ("StoreWarning",),
    "ops.config.store_key": ("StoreKeyError",),
    "ops.core.autodiff": ("GradientError",),
    "ops.core.dispatch": ("PlatformError", "UnsupportedCallError"),
    "ops.core.kernel": ("KernelDefinitionError",),
    "ops.core.meshed": ("MeshError",),
    "ops.execution.batch": ("BatchArgumentError",),
    "ops.execution.benchmarking": ("BenchmarkError",),
    "ops.execution.distributed": ("PeerLostError",),
    "ops.execution.executor": ("ChooserError",),
    "ops.execution.fleet": ("FleetError",),
    "ops.execution.offline": ("UnmatchedCallWarning",),
    "ops.execution.problem": ("TuningInputsError",),
    "ops.execution.racing": ("RaceError",),
    "ops.execution.remote": ("RemoteBenchError",),
    "ops.execution.result": ("ResultFileError",),
    "ops.execution.search.space": ("SpaceError",),
    "ops.execution.session": ("TuningError",),
    "ops.execution.sharding": ("ShardingArgumentError",),
    "ops.execution.shortfall": ("TuningWarning",),
    "ops.execution.timers.base": ("TimerError",),
    "ops.execution.tuner": ("TunerSettingError",),
    "ops.execution.tuning": ("RecordedCallsError",),
    "ops.execution.workers.process": ("JobCrashed", "JobError", "JobOutOfMemory", "JobRaised", "JobTimedOut"),
    "ops.registry": ("KernelGoneError",),
    "ops.specs": ("SpecError",),
    "ops.utils.arguments": ("StaticArgumentError",),
    "ops.utils.env": ("EnvironmentValueError",),
    "ops.utils.jsontext": ("JsonTextError",),
    "ops.utils.meta": ("LabelError", "ProgramError"),
    "ops.utils.params": ("ParamsError",),
    "ops.utils.records": ("ConfigMismatchError", "UnknownClassError"),
    "ops.utils.tagged": ("ConfigEncodeError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ejkernel.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
