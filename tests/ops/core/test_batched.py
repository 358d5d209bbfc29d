"""A kernel under `jax.vmap` as a kernel of its own."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._compat import Axis
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.batched import Batch, BatchedKernel
from ejkernel.ops.core.kernel import Invocation
from tests.support import GAIN, CustomVjp, OwnBackward, Scale


def test_gradients_have_the_batch_where_the_arguments_have_it_and_are_summed_where_they_have_none():
    x, y, dout = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 4, 5), (3, 4), (5, 3, 4)]))
    kernel = BatchedKernel(CustomVjp(), Batch(Axis(5, None, None), (2, None)))
    dx, dy = kernel.custom_vjp((x, y), Scale(2), {}, (dout,))
    last = jnp.moveaxis(dout, 0, 2)
    np.testing.assert_allclose(dx, 2 * GAIN * last * jnp.cos(x) * y[..., None], rtol=1e-6)
    np.testing.assert_allclose(dy, (2 * GAIN * last * jnp.sin(x)).sum(2), rtol=1e-5)


class OnlyBackward(OwnBackward):
    def supports(self, inv, platform):
        return isinstance(inv.kernel, BackwardKernel)

    def transfers(self, inv, cfg):
        return isinstance(inv.kernel, BackwardKernel)


def test_a_kernel_is_told_that_a_batch_is_one_of_backwards():
    single, batch = OnlyBackward(), Batch(Axis(5, None, None), (0, None))
    for kernel in (single, BatchedKernel(single, batch), BatchedKernel(BatchedKernel(single, batch), batch)):
        for asked, answer in ((kernel, False), (BackwardKernel(kernel), True)):
            inv = Invocation(kernel=asked, args=(jnp.zeros((5, 5, 3)), jnp.zeros(3)), kwargs={})
            assert asked.supports(inv, "xla") is asked.transfers(inv, Scale()) is answer
