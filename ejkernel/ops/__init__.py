"""The framework: kernels, which config a call gets, running and measuring."""

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel.errors import EjkernelError as EjkernelError
from ejkernel.ops.config.cache import ConfigCache as ConfigCache
from ejkernel.ops.config.cache import overlay_cache as overlay_cache
from ejkernel.ops.config.selection import AutotunePolicy as AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain as ConfigSelectorChain
from ejkernel.ops.config.selection import Tuner as Tuner
from ejkernel.ops.config.selection import policy_override as policy_override
from ejkernel.ops.core.kernel import Invocation as Invocation
from ejkernel.ops.core.kernel import Kernel as Kernel
from ejkernel.ops.core.types import Cfg as Cfg
from ejkernel.ops.core.types import Out as Out
from ejkernel.ops.execution.executor import ConfigChooser as ConfigChooser
from ejkernel.ops.execution.executor import Executor as Executor
from ejkernel.ops.execution.executor import default_executor as default_executor
from ejkernel.ops.execution.executor import set_default_executor as set_default_executor
from ejkernel.ops.registry import get_invocations as get_invocations
from ejkernel.ops.registry import record_invocation as record_invocation
from ejkernel.ops.utils.fingerprint import abstractify as abstractify
from ejkernel.ops.utils.fingerprint import default_key_builder_with_sharding as default_key_builder_with_sharding
from ejkernel.ops.utils.fingerprint import device_fingerprint as device_fingerprint
from ejkernel.ops.utils.fingerprint import device_kind as device_kind
from ejkernel.ops.utils.fingerprint import get_device_platform as get_device_platform
from ejkernel.ops.utils.fingerprint import sharding_fingerprint as sharding_fingerprint
from ejkernel.ops.utils.fingerprint import short_hash as short_hash
from ejkernel.ops.utils.fingerprint import stable_json as stable_json
from ejkernel.ops.utils.meta import LABEL_RE as LABEL_RE
from ejkernel.ops.utils.meta import extract_labels_from_hlo_text as extract_labels_from_hlo_text
from ejkernel.ops.utils.meta import find_labels_in_lowered as find_labels_in_lowered
from ejkernel.ops.utils.meta import label as label
from ejkernel.ops.utils.meta import labels_to_configs as labels_to_configs
from ejkernel.ops.utils.params import BwdParams as BwdParams
from ejkernel.ops.utils.params import FwdParams as FwdParams
from ejkernel.ops.wiring import connect as _connect

_connect()

__all__ = [
    "LABEL_RE",
    "AutotunePolicy",
    "Autotuner",
    "AutotuningResult",
    "BwdParams",
    "Cfg",
    "ConfigCache",
    "ConfigChooser",
    "ConfigSelectorChain",
    "EjkernelError",
    "Entry",
    "Executor",
    "FwdParams",
    "Invocation",
    "Kernel",
    "Measurement",
    "Out",
    "PersistentCache",
    "Tuner",
    "abstractify",
    "autotune",
    "autotune_lowered",
    "autotune_recorded",
    "benchmark",
    "default_executor",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "label",
    "labels_to_configs",
    "overlay_cache",
    "pmap_with_config",
    "policy_override",
    "record_invocation",
    "set_default_executor",
    "sharding_fingerprint",
    "short_hash",
    "specs_of",
    "stable_json",
    "to_json",
    "vmap_with_config",
]

# Measuring and storing are imported on first use: `import ejkernel.ops` stays close to `import jax`.
_LAZY = {
    "AutotuningResult": "execution.tuning",
    "Autotuner": "execution.tuning",
    "Entry": "execution.tuning",
    "Measurement": "execution.tuning",
    "PersistentCache": "store.persistent",
    "autotune": "execution.tuning",
    "autotune_lowered": "offline.lowered",
    "autotune_recorded": "execution.tuning",
    "benchmark": "execution.tuning",
    "from_json": "utils.serialize",
    "pmap_with_config": "execution.batch",
    "specs_of": "offline.lowered",
    "to_json": "utils.serialize",
    "vmap_with_config": "execution.batch",
}

if TYPE_CHECKING:
    from ejkernel.ops.execution.batch import pmap_with_config as pmap_with_config
    from ejkernel.ops.execution.batch import vmap_with_config as vmap_with_config
    from ejkernel.ops.execution.tuning import Autotuner as Autotuner
    from ejkernel.ops.execution.tuning import AutotuningResult as AutotuningResult
    from ejkernel.ops.execution.tuning import Entry as Entry
    from ejkernel.ops.execution.tuning import Measurement as Measurement
    from ejkernel.ops.execution.tuning import autotune as autotune
    from ejkernel.ops.execution.tuning import autotune_recorded as autotune_recorded
    from ejkernel.ops.execution.tuning import benchmark as benchmark
    from ejkernel.ops.offline.lowered import autotune_lowered as autotune_lowered
    from ejkernel.ops.offline.lowered import specs_of as specs_of
    from ejkernel.ops.store.persistent import PersistentCache as PersistentCache
    from ejkernel.ops.utils.serialize import from_json as from_json
    from ejkernel.ops.utils.serialize import to_json as to_json


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
