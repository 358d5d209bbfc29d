"""A layer of experts on four devices: each holds two experts, and finds its rows by the group offset.

Run: python examples/experts.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import grouped_matmul

EXPERTS, TOKENS, WIDTH, HIDDEN = 8, 64, 16, 32


def layer(x, w_in, w_out, expert, offset=None):
    """Each token through the expert that it was given to: two grouped products with the activation between."""
    order = jnp.argsort(expert)  # Rows of one expert lie together.
    sizes = jnp.bincount(expert, length=EXPERTS)
    hidden = jax.nn.silu(grouped_matmul(x[order], w_in, sizes, offset))
    out = grouped_matmul(hidden, w_out, sizes, offset)
    return jnp.zeros_like(out).at[order].set(out)


def spread(mesh):
    """The same with the experts over an axis of the mesh: rows of others are zeros, so the results add up."""

    def local(x, w_in, w_out, expert):
        offset = jax.lax.axis_index("experts") * w_in.shape[0]
        return jax.lax.psum(layer(x, w_in, w_out, expert, offset), "experts")

    specs = (P(), P("experts"), P("experts"), P())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())


def main():
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (TOKENS, WIDTH))
    w_in = jax.random.normal(keys[1], (EXPERTS, WIDTH, HIDDEN)) / WIDTH**0.5
    w_out = jax.random.normal(keys[2], (EXPERTS, HIDDEN, WIDTH)) / HIDDEN**0.5
    expert = jax.random.randint(keys[3], (TOKENS,), 0, EXPERTS)
    mesh = jax.make_mesh((4,), ("experts",), axis_types=(AxisType.Auto,))
    loss = lambda run: lambda *args: (run(*args, expert) ** 2).mean()
    one = jax.jit(jax.value_and_grad(loss(layer), (0, 1, 2)))(x, w_in, w_out)
    four = jax.jit(jax.value_and_grad(loss(spread(mesh)), (0, 1, 2)))(x, w_in, w_out)
    worst = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), one, four)))
    print(f"{EXPERTS} experts, {TOKENS} tokens, {mesh.size} devices: loss {float(one[0]):.4f}")
    print(f"the largest difference between one device and four, gradients included: {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
