"""Which class a stored config may be read as."""

import pytest

from ejkernel.ops.config.kinds import is_renamed
from ejkernel.ops.utils.classes import name_of
from tests.support import Scale


@pytest.mark.parametrize(
    ("stored", "may_be"),
    [
        (name_of(Scale), True),
        ("tests.long_ago:Gone", True),
        ("__main__:Gone", True),
        ("another_package.configs:Scale", False),
        ("builtins:int", False),
    ],
)
def test_class_that_is_gone_may_be_read_as_another_one_of_its_package(stored, may_be):
    assert is_renamed(stored, Scale) is may_be
