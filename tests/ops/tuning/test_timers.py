import itertools
import logging
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _compat
from ejkernel.ops.tuning import timers
from ejkernel.ops.tuning.timers import base, cupti, xplane
from ejkernel.ops.tuning.timers.rotation import last_level_cache_bytes
from ejkernel.ops.tuning.timers.xplane import device_seconds


def sleeper(seconds):
    return partial(time.sleep, seconds)


@pytest.mark.parametrize("wait_for_each", [True, False])
def test_the_wall_clock_gives_seconds_per_call(wait_for_each):
    clock = timers.WallClock(wait_for_each=wait_for_each)
    short, long = clock.measure([sleeper(0.005), sleeper(0.2)])
    assert 0.005 <= short < 0.15
    assert 0.2 <= long < 0.6


def test_calls_that_wait_for_a_core_do_not_count_on_a_cpu():
    turns = itertools.cycle([0.0005, 0.2])  # Every other call is interrupted.
    clock = timers.WallClock(wait_for_each=True)
    assert clock.measure([lambda: time.sleep(next(turns))])[0] < 0.1


def test_sample_of_a_cpu_is_the_lower_quartile_of_its_calls(monkeypatch):
    clock, times = timers.WallClock(wait_for_each=True, sample_s=1e-3), iter([5e-3, 1e-3, 4e-3, 2e-3, 3e-3])
    monkeypatch.setattr(clock, "_time", lambda call, n: next(times))
    assert clock.measure([lambda: None]) == [2e-3]


def test_first_call_that_waits_for_a_core_does_not_make_a_short_one_long():
    pauses = itertools.chain([0.15], itertools.repeat(0.0005))
    assert timers.WallClock(wait_for_each=True).measure([lambda: time.sleep(next(pauses))])[0] < 0.1


def test_short_calls_are_repeated_until_a_sample_is_long_enough():
    lengths = []

    def run(n):
        lengths.append(n * 1e-5 + 1e-4)  # A fixed price per sample, as waiting has: it must not end up in the result.
        return lengths[-1]

    per_call = base.repeat(run, 1e-3)
    assert lengths[-1] >= 1e-3
    assert per_call == pytest.approx(1e-5, rel=0.15)


def test_a_long_call_runs_once():
    runs = []
    base.repeat(lambda n: runs.append(n) or 0.01, 1e-3)
    assert runs == [1]


def test_a_call_too_fast_for_any_clock_still_has_a_positive_time():
    assert base.repeat(lambda n: 0.0, 1e-3) > 0


def test_a_cpu_waits_for_each_call_because_it_would_run_them_side_by_side():
    (timer,) = timers.available(jax.devices("cpu")[0])
    assert timer.wait_for_each
    assert isinstance(timers.choose(jax.devices("cpu")[0]), timers.WallClock)


class FakeExtension:
    """A CUPTI that launches one kernel of 50 microseconds per call."""

    def __init__(self, busy=False):
        self.busy, self.listening, self.calls = busy, False, 0

    def _cupti_init(self):
        if self.busy:
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        self.listening, self.calls = True, 0

    def _cupti_get_timings(self, finalize):
        assert self.listening
        self.listening = False
        return [("kernel", 0.05)] * self.calls

    def launch(self):
        self.calls += 1


@pytest.fixture
def extension(monkeypatch):
    fake = FakeExtension()
    monkeypatch.setattr(_compat, "cupti", lambda: fake)
    return fake


def test_cupti_adds_up_the_kernels_of_each_call(extension):
    assert timers.Cupti().measure([extension.launch] * 2) == pytest.approx([5e-5, 5e-5])


def test_cupti_stops_listening_when_the_call_raises(extension):
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timers.Cupti().measure([broken])
    assert not extension.listening
    assert timers.Cupti().measure([extension.launch]) == pytest.approx([5e-5])  # And lets the next one in.


def test_cupti_without_kernels_is_an_error_and_not_a_zero(extension):
    with pytest.raises(timers.TimerError, match="launched no kernel"):
        timers.Cupti().measure([lambda: None])


def test_cupti_without_the_plugin_says_so(monkeypatch):
    monkeypatch.setattr(_compat, "cupti", lambda: None)
    with pytest.raises(timers.TimerError, match="no CUDA plugin"):
        timers.Cupti().measure([lambda: None])


def test_a_busy_cupti_falls_back_with_a_log_line(extension, monkeypatch, caplog):
    extension.busy = True
    cpu = jax.devices("cpu")[0]
    wall = timers.WallClock(wait_for_each=True)
    monkeypatch.setattr(timers, "available", lambda device, exclusive: [timers.Cupti(), wall])
    with caplog.at_level(logging.WARNING, logger="ejkernel"):
        assert timers.choose(cpu) is wall
    assert "another profiler is listening (CUPTI_ERROR_MULTIPLE" in caplog.text


def test_skipped_timers_are_not_tried(extension, monkeypatch):
    first, second = timers.Cupti(), timers.WallClock(wait_for_each=True)
    monkeypatch.setattr(timers, "available", lambda device, exclusive: [first, second])
    assert timers.choose(jax.devices("cpu")[0], skip={"cupti"}) is second


def test_a_second_thread_waits_for_the_profiler_and_gives_up_in_the_end():
    with (
        base.profiling("one"),
        pytest.raises(timers.TimerError, match="another thread has been measuring"),
        base.profiling("two", timeout_s=0.05),
    ):
        pass


def profile(*device_planes, marks=((0, 100), (200, 300))):
    """A profile as text: annotated calls on the host, spans in nanoseconds on the devices."""
    names = {}

    def line(name, spans):
        events = "".join(
            f"events {{ metadata_id: {names.setdefault(event, len(names) + 1)} offset_ps: {int(start * 1000)} "
            f"duration_ps: {int((end - start) * 1000)} }} "
            for event, start, end in spans
        )
        return f'lines {{ name: "{name}" timestamp_ns: 0 {events} }} '

    def plane(name, lines):
        names.clear()
        body = "".join(line(*each) for each in lines)
        meta = "".join(f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }} ' for n, i in names.items())
        return f'planes {{ name: "{name}" {body} {meta} }} '

    annotations = [(f"ejkernel.sample.{i}", *span) for i, span in enumerate(marks)]
    text = plane("/host:CPU", [("python", [*annotations, ("other", 0, 1000)])])
    text += "".join(plane(name, lines) for name, lines in device_planes)
    data = jax.profiler.ProfileData
    return data.from_serialized_xspace(data.text_proto_to_serialized_xspace(text))


def test_xplane_counts_overlapping_kernels_once():
    streams = [
        ("Stream #1(compute)", [("a", 10, 30), ("b", 210, 260)]),
        ("Stream #2(compute)", [("c", 20, 50), ("d", 280, 290)]),
        ("XLA Ops", [("a", 0, 300)]),  # Derived lines repeat the streams.
    ]
    assert device_seconds(profile(("/device:GPU:0", streams)), 2) == pytest.approx([40e-9, 60e-9])


def test_xplane_takes_whole_modules_on_a_tpu_and_the_slowest_device():
    def chip(scale):
        return [("XLA Modules", [("m", 10, 10 + scale), ("m", 210, 220)]), ("XLA Ops", [("o", 0, 300)])]

    both = profile(("/device:TPU:0", chip(20)), ("/device:TPU:1", chip(50)))
    assert device_seconds(both, 2) == pytest.approx([50e-9, 10e-9])


def test_xplane_refuses_a_trace_that_does_not_show_every_call():
    half = ("/device:GPU:0", [("Stream #1", [("a", 10, 30)])])
    with pytest.raises(timers.TimerError, match="without device events"):
        device_seconds(profile(half), 2)
    with pytest.raises(timers.TimerError, match="without device events"):
        device_seconds(profile(), 2)
    with pytest.raises(timers.TimerError, match="3 calls left 2 annotations"):
        device_seconds(profile(half), 3)


def test_xplane_beside_a_running_trace_says_so(tmp_path):
    with jax.profiler.trace(str(tmp_path)), pytest.raises(timers.TimerError, match="profiler is in use"):
        timers.Xplane().measure([lambda: None])


def test_xplane_on_a_cpu_has_no_device_events():
    x = jnp.ones(8)
    with pytest.raises(timers.TimerError, match="without device events"):
        timers.Xplane().measure([lambda: x + 1])


def test_cold_calls_take_their_inputs_in_turn():
    seen = []
    x = jnp.arange(1024.0)
    call = timers.cold(lambda x, *, y, flag: seen.append((x, y, flag)), (x,), {"y": x, "flag": True}, cache_bytes=8192)
    for _ in range(5):
        call()
    firsts = [entry[0] for entry in seen]
    assert len({id(array) for array in firsts}) == 4  # 3 * 8 KiB in steps of 8 KiB, and one more.
    assert firsts[4] is firsts[0]
    assert len({array.unsafe_buffer_pointer() for array in firsts}) == 4
    assert all(np.array_equal(array, x) and flag is True for array, _, flag in seen)


def test_inputs_too_small_for_a_cold_cache_are_told(caplog):
    with caplog.at_level(logging.INFO, logger="ejkernel"):
        timers.cold(lambda x: x, (jnp.ones(2),), cache_bytes=1 << 30)
    assert "do not fill the cache" in caplog.text


def test_the_host_cache_has_a_sensible_size():
    assert 1 << 18 <= last_level_cache_bytes(jax.devices("cpu")[0]) <= 1 << 31


def test_importing_timers_starts_no_backend():
    code = (
        "import ejkernel.ops.tuning.timers, ejkernel.ops.tuning.stopwatch, sys;"
        "from jax._src import xla_bridge; sys.exit(bool(xla_bridge._backends))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class FakeDevice:
    platform = "gpu"


def test_cupti_is_only_chosen_where_nobody_else_profiles(extension):
    # After a trace of JAX's profiler it would end the process.
    assert [timer.name for timer in timers.available(FakeDevice())] == ["xplane", "wall"]
    assert [timer.name for timer in timers.available(FakeDevice(), exclusive=True)] == ["cupti", "wall"]


@pytest.mark.gpu
def test_xplane_and_cupti_agree_on_a_gpu():
    code = """
import sys; from functools import partial; from statistics import median
import jax, jax.numpy as jnp
from ejkernel.ops.tuning import timers
x = jnp.ones((4096, 4096), jnp.bfloat16)
call = partial(jax.jit(lambda x: x @ x), x)
jax.block_until_ready(call())
timer = timers.choose(exclusive=sys.argv[1] == "cupti")
assert timer.name == sys.argv[1]
print(median(timer.measure([call] * 9)))
"""
    seconds = [
        float(subprocess.run([sys.executable, "-c", code, name], stdout=subprocess.PIPE, check=True).stdout)
        for name in ("xplane", "cupti")
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


def test_short_calls_are_traced_often_enough(monkeypatch):
    rounds = []

    def traced(samples):
        rounds.append([n for _, n in samples])
        return [{"short": 1e-5, "long": 1e-3}[call] * n for call, n in samples]

    monkeypatch.setattr(xplane, "_traced", traced)
    assert timers.Xplane().measure(["long", "short", "long"]) == pytest.approx([1e-3, 1e-5, 1e-3])
    assert rounds == [[1, 1, 1], [20]]
    timers.Xplane().measure(["long"])
    assert rounds[2:] == [[1]]


def test_cupti_times_are_only_read_once_per_sample(extension):
    # Guards against reading the same kernels into two samples.
    assert cupti.Cupti(sample_s=1e-6).measure([extension.launch]) == pytest.approx([5e-5])
    assert extension.calls == 1
