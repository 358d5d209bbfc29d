"""The hash of a kernel's source follows what it computes, not how it is written down."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from ejkernel.modules import RmsNorm
from ejkernel.ops.utils import source
from ejkernel.ops.utils.fingerprint import short_hash
from ejkernel.ops.utils.source import is_source, normal, source_hash

KERNEL = '''
from pkg.parts import base, helper as h
from pkg import parts

LIMIT = 3

class Mine(base.Base):
    """Doc."""
    def run(self, x):
        y = h(x)  # comment
        return y + parts.other(x)
    def run_lazy(self, x):
        from pkg.lazy import lazily
        return lazily(x)
'''
PARTS = {
    "__init__": "from . import base\nfrom .base import helper\ndef other(x):\n    return x\n",
    "base": "import functools\ndef deep(x): return x\n"
    "@functools.lru_cache\ndef helper(x): return deep(x)\nclass Base:\n    def prepare(self, x): return x\n",
}
LAZY = "def lazily(x): return x\n"


def build(folder, monkeypatch, change=lambda files: None):
    """Hash of the kernel in a package that `change` has edited."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "pkg"]:
        del sys.modules[name]
    files = {"__init__.py": "", "kernel.py": KERNEL, "lazy.py": LAZY}
    files |= {f"parts/{part}.py": text for part, text in PARTS.items()}
    change(files)
    for file, text in files.items():
        path = folder / "pkg" / file
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        return source_hash(importlib.import_module("pkg.kernel").Mine)


def edit(file, old, new):
    def change(files):
        assert old in files[file]
        files[file] = files[file].replace(old, new)

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit("kernel.py", "# comment", "# another"),
        edit("kernel.py", '"""Doc."""', '"""Other\n\n    doc."""'),
        edit("kernel.py", "LIMIT = 3", "\n\n\nLIMIT = 4"),
        edit("kernel.py", "h(x)", "h( x, )"),
        edit("parts/base.py", "import functools", "import functools, json"),
        edit("lazy.py", "def lazily(x): return x", '"""Doc."""\ndef lazily(x):\n    # Why.\n    return x'),
    ],
)
def test_writing_it_differently_changes_nothing(tmp_path, monkeypatch, change):
    assert build(tmp_path / "b", monkeypatch, change) == build(tmp_path / "a", monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        edit("kernel.py", "y + parts", "y - parts"),
        edit("parts/__init__.py", "return x", "return x + 1"),
        edit("parts/base.py", "def prepare(self, x): return x", "def prepare(self, x): return -x"),
        edit("parts/base.py", "return deep(x)", "return deep(-x)"),
        edit("parts/base.py", "def deep(x): return x", "def deep(x): return 2 * x"),
        edit("lazy.py", "return x", "return -x"),
    ],
)
def test_computing_something_else_changes_it(tmp_path, monkeypatch, change):
    assert build(tmp_path / "b", monkeypatch, change) != build(tmp_path / "a", monkeypatch)


CONSTANTS = """
import math
from pkg.parts import SHARED, base
from pkg import parts

BASE = 2
LIMIT = BASE * parts.SCALE
TABLE = {"a": 1}
calls = []
count = 0
if LIMIT:
    LATE = (1, 2)

class Mine(base.Base):
    def run(self, x):
        global count
        count += 1
        calls.append(x)
        return helper(x) + LIMIT + SHARED + TABLE["a"] + math.pi

def helper(x):
    return x + LATE[0]
"""


def with_constants(*changes):
    def change(files):
        files["kernel.py"] = CONSTANTS
        files["parts/__init__.py"] = "from .base import *\nfrom .numbers import SCALE\nSHARED = 5\n"
        files["parts/numbers.py"] = "SCALE = 7\n"
        for one in changes:
            one(files)

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit("kernel.py", "BASE = 2", "BASE = 3"),
        edit("kernel.py", "LIMIT = BASE *", "LIMIT = BASE +"),
        edit("kernel.py", 'TABLE = {"a": 1}', 'TABLE = {"a": 2}'),
        edit("kernel.py", "calls = []", 'calls = []\nTABLE["b"] = 4'),
        edit("kernel.py", "LATE = (1, 2)", "LATE = (1, 3)"),
        edit("parts/__init__.py", "SHARED = 5", "SHARED = 6"),
        edit("parts/numbers.py", "SCALE = 7", "SCALE = 8"),
    ],
)
def test_another_constant_of_a_module_changes_it(tmp_path, monkeypatch, change):
    one = build(tmp_path / "a", monkeypatch, with_constants())
    assert build(tmp_path / "b", monkeypatch, with_constants(change)) != one


@pytest.mark.parametrize(
    "change",
    [
        edit("kernel.py", "import math", "import math\nUNUSED = 3\n__version__ = '2'"),
        edit("kernel.py", "BASE = 2", "BASE = 2  # Why."),
        lambda files: files.update(
            {
                "parts/elsewhere.py": files.pop("parts/numbers.py"),
                "parts/__init__.py": files["parts/__init__.py"].replace(".numbers", ".elsewhere"),
            }
        ),
    ],
)
def test_constants_that_are_not_used_or_only_moved_change_nothing(tmp_path, monkeypatch, change):
    one = build(tmp_path / "a", monkeypatch, with_constants())
    assert build(tmp_path / "b", monkeypatch, with_constants(change)) == one


def test_what_changes_while_a_module_runs_does_not_count(tmp_path, monkeypatch):
    one = build(tmp_path, monkeypatch, with_constants())
    module = sys.modules["pkg.kernel"]
    module.Mine().run(1)
    assert module.count == 1
    source._hashes.clear()
    assert source_hash(module.Mine) == one


def test_constants_of_a_prompt_count_by_value():
    def prompt(limit):
        scope = {"__name__": "nowhere", "LIMIT": limit}
        exec("class Typed:\n    def run(self, x): return x + LIMIT", scope)
        return source_hash(scope["Typed"])

    assert prompt(3) == prompt(3) != prompt(4)


def test_hash_that_was_stored_before_constants_counted_is_held_to_what_it_meant_then(tmp_path, monkeypatch):
    build(tmp_path / "a", monkeypatch, with_constants())
    before = sys.modules["pkg.kernel"].Mine
    old, new = source_hash(before, first=True), source_hash(before)
    assert (len(old), new[:2]) == (16, "2:")
    assert is_source(before, old)
    assert is_source(before, new)
    build(tmp_path / "b", monkeypatch, with_constants(edit("kernel.py", "BASE = 2", "BASE = 3")))
    after = sys.modules["pkg.kernel"].Mine
    assert is_source(after, old)
    assert not is_source(after, new)


def test_first_definition_stays_what_it_was(tmp_path, monkeypatch):
    build(tmp_path, monkeypatch)
    # Written down when constants began to count: stores hold such hashes.
    assert source_hash(sys.modules["pkg.kernel"].Mine, first=True) == "1dbae2d85c740633"


def typed(body):
    """A class as a prompt makes it."""
    scope = {"__name__": "nowhere"}
    exec(f"class Typed:\n    def run(self, x): {body}", scope)
    return scope["Typed"]


def test_without_source_the_compiled_code_counts():
    same = [source_hash(typed('return x in {"a", "b", "c"}')) for _ in range(2)]
    assert same[0] == same[1] is not None
    assert source_hash(typed('return x in {"a", "b", "d"}')) != same[0]
    assert source_hash(typed("return (lambda: x + 1)()")) != source_hash(typed("return (lambda: x + 2)()"))
    assert source_hash(typed("return x + y")) != source_hash(typed("return x + z"))


def test_compiled_code_has_the_same_hash_in_every_process():
    program = (
        "from ejkernel.ops.utils.source import source_hash\n"
        "scope = {'__name__': 'nowhere'}\n"
        'exec(\'class Typed:\\n    def run(self, x): return x in {"a", "b", "c"}\', scope)\n'
        "print(source_hash(scope['Typed']))"
    )
    run = lambda seed: subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
    )
    assert run("1") == run("2") != "None\n"


def test_a_class_without_any_code_has_no_hash():
    assert source_hash(type("Empty", (), {"__module__": "nowhere"})) is None


SAMPLE = textwrap.dedent(
    """
    @decorate(1)
    class A(B, metaclass=M):
        x: int = 1
        async def f(self, a, /, *b, c=1, **d) -> str:
            with a as b, c: pass
            return f"{a!r:>{c}}" + "a" "b"
        def g(self):
            match self:
                case [1, *_]: return (y := 1)
            return [i for i in range(3) if i] or {**{}} or (lambda: 0)
    """
)


def test_the_text_is_the_same_in_every_python():
    assert short_hash(normal(SAMPLE)) == "ffb89a6ca1c5eb59"


def test_file_that_holds_something_else_by_now_is_no_source(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("It isn't code,\n'nor does it end\n")
    module = types.ModuleType("page")
    module.__file__ = str(page)
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile("class Page:\n    def run(self): return 1\n", str(page), "exec"), vars(module))
    other = dict(vars(module))
    exec(compile("class Page:\n    def run(self): return 2\n", str(page), "exec"), other)
    assert source_hash(module.Page) != source_hash(other["Page"])


def test_threads_may_hash_at_the_same_time():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            hashes = set(pool.map(lambda i: source_hash(RmsNorm, skip=(f"method_{i}",)), range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert hashes == {source_hash(RmsNorm)}


def test_compiled_code_of_helpers_does_not_count_where_there_is_source(tmp_path, monkeypatch):
    (tmp_path / "helped.py").write_text(
        "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\n"
        "class Helped:\n    def run(self, x): return Pair(x, x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from ejkernel.ops.utils import source

    monkeypatch.setattr(source, "_compiled", lambda item, skip: pytest.fail("bytecode differs between versions"))
    assert source_hash(importlib.import_module("helped").Helped) is not None
