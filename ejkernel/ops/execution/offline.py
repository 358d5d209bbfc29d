"""The public home of `autotune_lowered`, which the room for work before a run holds."""

from ejkernel.ops.offline.lowered import autotune_lowered as autotune_lowered
