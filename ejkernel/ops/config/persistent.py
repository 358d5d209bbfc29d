"""The public home of `PersistentCache`, which the store's room holds."""

from ejkernel.ops.store.persistent import PersistentCache as PersistentCache
