"""A call as data and back."""

import jax
import jax.numpy as jnp

from ejkernel._compat import Axis
from ejkernel.ops import Invocation
from ejkernel.ops.core.batched import Batch, BatchedKernel, batches_around
from ejkernel.ops.offline import specs
from tests.support import Plain


def test_nested_batches_come_back_in_their_order():
    row = jax.ShapeDtypeStruct((4,), jnp.float32)
    inv = Invocation(kernel=Plain(), args=(row, row))
    batches = [Batch(Axis(2), (0, None)), Batch(Axis(3), (1, 0))]
    for batch in batches:
        inv = BatchedKernel(inv.kernel, batch).invocation(inv)
    back = specs.from_spec(specs.to_spec(inv))
    assert back.key == inv.key
    assert batches_around(back.kernel) == batches
