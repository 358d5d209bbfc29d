"""A first kernel: one class, called like any JAX function, and the reason why it got its config."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, overlay_cache


@dataclass(frozen=True)
class Chunks:
    rows: int = 256


class RowSoftmax(Kernel[Chunks, jax.Array]):
    """Softmax over rows, `rows` of them at a time."""

    def run(self, x, *, cfg):
        return jax.lax.map(jax.nn.softmax, x, batch_size=cfg.rows)

    def heuristic_cfg(self, inv):
        return Chunks(rows=min(256, inv.args[0].shape[0]))

    def config_space(self, inv):
        return [Chunks(rows) for rows in (16, 64, 256, 1024) if rows <= inv.args[0].shape[0]]


def main():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    softmax, x = RowSoftmax("row_softmax"), jax.random.normal(jax.random.key(0), (1024, 512))

    error = jnp.abs(executor(softmax, x) - jax.nn.softmax(x)).max()
    slope = jax.jit(jax.grad(lambda x: (executor(softmax, x) ** 2).sum()))(x)
    print(f"row_softmax on {x.shape}: largest error {error:.1e}, gradient norm {jnp.linalg.norm(slope):.3f}\n")

    explanation = executor.explain(softmax, x)
    print(explanation)

    print("\nThe same call under an overlay:\n")
    with overlay_cache({explanation.key: Chunks(rows=64)}):
        print(executor.explain(softmax, x))


if __name__ == "__main__":
    main()
