"""What else computes grouped products: `jax.lax.ragged_dot`; and one dense product with as many operations."""

import jax


def peers(workload):
    return {"lax.ragged_dot": jax.lax.ragged_dot, "dense": lambda lhs, rhs, sizes: lhs @ rhs[0]}
