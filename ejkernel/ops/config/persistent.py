"""The public module of `PersistentCache`, which is defined in `ejkernel.ops.store`."""

from ejkernel.ops.store.persistent import PersistentCache as PersistentCache
