import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops.tuning.cost import Cost, cost_of, flops_of, larger


def compiled(fn, *shapes):
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()


def test_product_is_counted_with_the_bytes_it_must_move():
    found = cost_of(compiled(jnp.dot, (64, 32), (32, 16)))
    assert found == Cost(flops=2 * 64 * 32 * 16, bytes=4 * (64 * 32 + 32 * 16 + 64 * 16))


def test_loop_hides_its_work_and_the_reference_gives_it_back():
    looped = compiled(lambda x, y: jax.lax.map(lambda row: row @ y, x), (64, 32), (32, 16))
    assert cost_of(looped).flops < 2 * 64 * 32 * 16
    least = flops_of(jnp.dot, jnp.ones((64, 32)), jnp.ones((32, 16)))
    assert least == 2 * 64 * 32 * 16
    assert cost_of(looped, least).flops == least


class Silent:
    def __init__(self, answer):
        self.answer = answer

    def cost_analysis(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def memory_analysis(self):
        return None


@pytest.mark.parametrize("answer", [None, {}, {"flops": -1.0}, {"flops": 5.0}, NotImplementedError(), TypeError()])
def test_compiler_that_does_not_tell_is_no_cost(answer):
    assert cost_of(Silent(answer)) is None


def test_function_that_cannot_be_traced_counts_nothing():
    assert flops_of(lambda x: float(x), jnp.ones(())) == 0.0


def test_larger_count_saw_more():
    small, large = Cost(flops=1, bytes=9), Cost(flops=2, bytes=3)
    assert larger(small, large) == larger(large, small) == large
    assert larger(None, small) == larger(small, None) == small
    assert larger(None, None) is None
