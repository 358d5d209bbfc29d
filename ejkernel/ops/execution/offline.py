"""The public module of `autotune_lowered`, which is defined in `ejkernel.ops.offline`."""

from ejkernel.ops.offline.lowered import autotune_lowered as autotune_lowered
