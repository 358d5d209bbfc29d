"""A kernel on a mesh of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Kernel
from ejkernel.ops.core.meshed import MeshError, on_mesh
from tests.support import Scale


class Summing(Kernel[Scale, jax.Array]):
    def run(self, x, *, cfg):
        return jax.lax.psum(x, "d")

    def heuristic_cfg(self, inv):
        return Scale()


def test_mesh_may_have_as_many_devices_as_there_are_and_no_more():
    count = len(jax.devices())
    kernel, place = on_mesh(Summing("summing"), {"d": count})
    np.testing.assert_array_equal(kernel.run(place(jnp.ones(3)), cfg=Scale()), np.full(3, count))
    with pytest.raises(MeshError, match=f"{count + 1} devices; there are {count}"):
        on_mesh(Summing("summing"), {"d": count + 1})
