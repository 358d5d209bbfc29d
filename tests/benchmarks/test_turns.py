"""Turns on the device, with processes that take them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_who_holds_the_device_too_long_ends():
    code = "from benchmarks.turns import guard\nwith guard(0.05): import time; time.sleep(20)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_two_turns_are_one_after_the_other(tmp_path):
    code = (
        "import sys, time; from benchmarks.turns import turn\n"
        "with turn(sys.argv[1]): print(time.monotonic()); time.sleep(0.2); print(time.monotonic())"
    )
    command = [sys.executable, "-S", "-c", code, tmp_path / "turn"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    first, second = sorted([float(x) for x in each.communicate(timeout=30)[0].split()] for each in started)
    assert first[1] <= second[0]
