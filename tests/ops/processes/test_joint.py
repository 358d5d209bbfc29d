"""Who measures a call that several processes ask for."""

import pytest

from ejkernel.ops import AutotunePolicy
from ejkernel.ops.processes.joint import _is_shared
from tests.support import Plain


@pytest.mark.parametrize(
    ("collective", "sharded", "together", "shared"),
    [
        (False, False, True, False),
        (False, True, False, False),
        (False, True, True, True),
        (True, False, False, True),
    ],
)
def test_candidates_are_spread_only_over_processes_that_have_all_come(collective, sharded, together, shared):
    kernel = Plain()
    kernel.collective = collective
    assert _is_shared(kernel, AutotunePolicy(sharded=sharded), {"together": together}) is shared
