"""Every error and warning of ejkernel, importable from here; catch `EjkernelError` to catch all errors.

Each is defined beside the code that raises it, and looked up there on first use: this module imports nothing.
"""

import importlib
from typing import Any


class EjkernelError(Exception):
    """Base class of ejkernel's own errors."""


_HOMES = {
    "cli.arguments": ("ArgumentTextError",),
    "cli.jax_start": ("BackendStartError",),
    "cli.operations": ("OperationError",),
    "kernels.flash_attention.checks": ("AttentionArgumentError",),
    "kernels.flash_attention.reference": ("ReferenceTooLargeError",),
    "kernels.grouped_matmul.dimensions": ("TileSizeError",),
    "kernels.linear_cross_entropy.params": ("ChunkSizeError",),
    "kernels.linear_cross_entropy.rule": ("AxisNameError",),
    "kernels.rows": ("RowSizeError",),
    "modules.grouped_matmul": ("GroupedMatmulArgumentError",),
    "modules.linear_cross_entropy": ("LossArgumentError",),
    "modules.norms": ("NormArgumentError",),
    "ops.config.cache": ("CacheKeyError",),
    "ops.config.kinds": ("ConfigClassError", "ConfigClassWarning"),
    "ops.config.policy": ("PolicyError",),
    "ops.config.selection": ("ConfigNotFoundError", "SymbolicCallWarning"),
    "ops.core.autodiff": ("GradientError",),
    "ops.core.backend": ("ParamsTypeError",),
    "ops.core.dispatch": ("PlatformError", "UnsupportedCallError"),
    "ops.core.kernel": ("KernelDefinitionError",),
    "ops.core.meshed": ("MeshError",),
    "ops.core.operation": ("OperationArgumentError",),
    "ops.execution.batch": ("BatchArgumentError",),
    "ops.execution.executor": ("ChooserError",),
    "ops.execution.parts": ("DivisionWarning",),
    "ops.execution.sharding": ("ShardingArgumentError",),
    "ops.execution.tuning": ("RecordedCallsError",),
    "ops.offline.adoption": ("OldCodeError",),
    "ops.offline.fleet": ("FleetError",),
    "ops.offline.lowered": ("UnmatchedCallWarning",),
    "ops.offline.lowered_entries": ("NotRebuiltError",),
    "ops.offline.result": ("ResultFileError",),
    "ops.offline.specs": ("SpecError",),
    "ops.processes.agreement": ("DecisionError",),
    "ops.processes.joint": ("JointTuningWarning",),
    "ops.processes.shared_tuning": ("PeerLostError",),
    "ops.registry": ("KernelGoneError",),
    "ops.store.entry": ("EntryError",),
    "ops.store.files": ("StoreWarning",),
    "ops.store.packs": ("PackError",),
    "ops.store.persistent": ("StoreSettingError",),
    "ops.store.places": ("StoreKeyError",),
    "ops.tuning.clock": ("RankingError",),
    "ops.tuning.isolated": ("IsolatedBenchError",),
    "ops.tuning.problem": ("TuningInputsError",),
    "ops.tuning.racing": ("RaceError",),
    "ops.tuning.schedule": ("ScheduleError",),
    "ops.tuning.search.space": ("SpaceError",),
    "ops.tuning.session": ("TuningError", "TuningRefusedError"),
    "ops.tuning.shortfall": ("TuningWarning",),
    "ops.tuning.stopwatch": ("BenchmarkError",),
    "ops.tuning.timers.base": ("TimerError",),
    "ops.tuning.autotuner": ("TunerSettingError",),
    "ops.tuning.workers.process": ("JobCrashed", "JobError", "JobOutOfMemory", "JobRaised", "JobTimedOut"),
    "ops.utils.arguments": ("StaticArgumentError",),
    "ops.utils.env": ("EnvironmentValueError",),
    "ops.utils.fingerprint": ("AbsentDeviceError",),
    "ops.utils.jsontext": ("JsonTextError",),
    "ops.utils.meta": ("LabelError", "ProgramError"),
    "ops.utils.params": ("ParamsError",),
    "ops.utils.records": ("ConfigMismatchError", "UnknownClassError"),
    "ops.utils.tagged": ("ConfigEncodeError",),
    "ops.utils.targets": ("TargetError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["EjkernelError", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ejkernel.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
