"""A bar on terminals, and log lines elsewhere."""

import io
import logging
import os
import pty
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from ejkernel.ops import Autotuner
from ejkernel.ops.tuning import progress
from tests.tuning_kernels import Doubling, call

SCRIPT = """
import jax.numpy as jnp
from ejkernel.ops import Autotuner
from tests.tuning_kernels import Doubling, call
tuning = Autotuner({settings}).tune(call(Doubling(), jnp.ones(256)), Doubling())
print("winner", tuning.cfg.loops)
"""


def on_terminal(settings=""):
    """What a tuning writes to a terminal as its standard error."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "300"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(settings=settings)], stdout=subprocess.PIPE, stderr=slave, env=env
    )
    os.close(slave)
    written = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # The other end is closed.
            break
        if not chunk:
            break
        written += chunk
    os.close(master)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == b"winner 1\n"
    return written.decode(errors="replace")


def test_terminal_shows_survivors_rounds_best_interval_and_time_left():
    drawn = on_terminal("budget_s=300, num_iters=300")
    assert "tests.doubling: compil" in drawn
    assert re.search(
        r"round \d+ of the \w+, \d of 3 alive, best Work\(.*\) [\d.e-]+ ms \[[\d.e-]+, [\d.e-]+\] "
        r"\(\d+ s, at most \d+ s left\)",
        drawn,
    ), drawn[-2000:]


def test_terminal_is_left_alone_on_request():
    assert on_terminal("progress=False") == ""


def test_elsewhere_nothing_is_drawn_and_events_are_logged(capfd, caplog):
    with caplog.at_level(logging.DEBUG, logger="ejkernel.tuning"):
        Autotuner().tune(call(Doubling(), jnp.ones(256)), Doubling())
    assert capfd.readouterr() == ("", "")
    text = caplog.text
    for part in ("tests.doubling: tuning", "compiled 3 of 3", "of 3 alive, best Work(", "tried 3: ", "winner Work("):
        assert part in text


def test_elsewhere_a_line_is_printed_now_and_then(capfd, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    Autotuner(num_iters=100).tune(call(Doubling(), jnp.ones(256)), Doubling())
    out, err = capfd.readouterr()
    assert out == ""
    assert "tests.doubling: compil" in err
    assert re.search(r"^tests.doubling: round \d+ of the \w+, \d of 3 alive, best Work\(.*s left\)$", err, re.M), err
    Autotuner(num_iters=100, progress=False).tune(call(Doubling(), jnp.ones(256)), Doubling())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("closed", [True, False])
def test_without_a_standard_error_a_tuning_goes_on(monkeypatch, closed):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.001)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    speaker = progress.Speaker()
    speaker.start("text")
    stream.close()
    speaker.stop()
    assert not speaker._thread.is_alive()
    with progress.Progress("op", None) as shown:
        shown.building(1, 2)


@pytest.mark.parametrize("level", [logging.WARNING])
def test_quiet_by_default(capfd, caplog, level):
    with caplog.at_level(level):
        Autotuner().tune(call(Doubling(), jnp.ones(256)), Doubling())
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")
