import pytest

from ejkernel.ops import BwdParams, FwdParams


@pytest.mark.parametrize("cls", [FwdParams, BwdParams])
def test_params_are_values_with_defaults(cls):
    assert cls() == cls()
    assert hash(cls(q_blocksize=64)) == hash(cls(q_blocksize=64))
    assert cls(q_blocksize=64, kv_blocksize=128, num_warps=4, num_stages=2).kv_blocksize == 128


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "64"])
def test_params_must_be_positive_integers(value):
    with pytest.raises(ValueError, match="FwdParams: q_blocksize must be a positive integer or None, got"):
        FwdParams(q_blocksize=value)
