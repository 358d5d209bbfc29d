"""What else computes attention: plain JAX."""

from functools import partial

import jax


def peers(workload):
    causal = workload.kwargs.get("causal", False)
    return {"jax.nn": partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")}
