"""The store at 10, 1 000 and 100 000 entries: does its cost grow with what it holds?

    python benchmarks/store.py [--quick] [--write]

Puts and first gets are interleaved over stores of all sizes, so that a busy disk hits them alike; the result is the
ratio to the smallest. `--write` puts the table into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ejkernel.ops.store import entry as entries
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.utils.fingerprint import short_hash
from ejkernel.ops.utils.params import FwdParams

ROOT = Path(__file__).parents[1]
SIZES = (10, 1_000, 100_000)
DEVICE, OP = "gpu-h200", "ejkernel.modules.flash_attention.FlashAttention"


def call(i: int) -> tuple[dict, str]:
    shape = {"dtype": "bfloat16", "shape": [4, i + 1, 16, 128]}
    signature = {"op": OP, "version": "0", "args": [shape] * 3, "kwargs": {}, "batch_axes": None, "context": None}
    return signature, short_hash(signature)


def config(i: int) -> FwdParams:
    return FwdParams(q_blocksize=64 << i % 3, kv_blocksize=64, num_warps=4 + i % 5, num_stages=2)


def put(cache: PersistentCache, i: int) -> None:
    signature, key = call(i)
    cache.put(
        DEVICE, OP, key, config(i), signature=signature, statistics={"median_s": 1e-3, "low_s": 9e-4, "high_s": 2e-3}
    )


def fill(root: Path, count: int) -> None:
    """Writes entries as `put` would, without waiting for the disk each time."""
    cache = PersistentCache(root)
    put(cache, 0)
    [sample] = cache.entries()
    folder = next(root.rglob("*.json")).parent
    for i in range(1, count):
        signature, key = call(i)
        made = entries.make((DEVICE, OP, key), config(i), signature=signature, provenance=sample.provenance)
        (folder / f"{key}.json").write_bytes(entries.to_bytes(made))
    os.sync()


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def scaling(roots: dict[int, Path], rounds: int) -> dict[str, dict[int, float]]:
    """Median seconds of a put of a new entry and of a first get, by size of the store."""
    times = {"put": {n: [] for n in roots}, "first get": {n: [] for n in roots}}
    rng = random.Random(0)
    caches = {n: PersistentCache(root) for n, root in roots.items()}
    for r in range(rounds):
        for n in rng.sample(list(roots), len(roots)):
            times["put"][n].append(timed(lambda n=n, r=r: put(caches[n], 10_000_000 + r)))
            key = call(rng.randrange(n))[1]
            fresh = PersistentCache(roots[n])
            times["first get"][n].append(timed(lambda fresh=fresh, key=key: fresh.get(DEVICE, OP, key)))
    return {what: {n: statistics.median(t) for n, t in by_size.items()} for what, by_size in times.items()}


READER = """
import sys, time
sys.path.insert(0, {root!r})
from benchmarks.store import *
root, stop = Path(sys.argv[1]), time.monotonic() + float(sys.argv[2])
reads = wrong = 0
print("ready", flush=True); sys.stdin.readline()
stop = time.monotonic() + float(sys.argv[2])
while time.monotonic() < stop:
    i = reads % 1000
    wrong += PersistentCache(root).get(DEVICE, OP, call(i)[1]) not in (config(i), config(i + 1))
    reads += 1
print(reads, wrong)
"""
WRITER = """
import sys, time
sys.path.insert(0, {root!r})
from benchmarks.store import *
cache, writes = PersistentCache(sys.argv[1]), 0
print("ready", flush=True); sys.stdin.readline()
stop = time.monotonic() + float(sys.argv[2])
while time.monotonic() < stop:
    i = writes % 1000
    signature, key = call(i)
    cache.put(DEVICE, OP, key, config(i + writes // 1000 % 2), signature=signature)
    writes += 1
print(writes, 0)
"""


def together(root: Path, readers: int, writers: int, seconds: float) -> dict[str, tuple[int, int]]:
    """Operations done and wrong answers read, by kind of process, all started at once."""
    scripts = [("read", READER)] * readers + [("write", WRITER)] * writers
    started = [
        (kind, subprocess.Popen([sys.executable, "-c", script.format(root=str(ROOT)), root, str(seconds)],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for kind, script in scripts
    ]  # fmt: skip
    for _, process in started:
        assert process.stdout.readline() == "ready\n"
    for _, process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    totals = {"read": (0, 0), "write": (0, 0)}
    for kind, process in started:
        done, wrong = map(int, process.communicate()[0].split())
        totals[kind] = (totals[kind][0] + done, totals[kind][1] + wrong)
    return totals


def listing(root: Path, *options: str) -> tuple[float, int]:
    """Seconds and lines of `ejkernel cache ls`."""
    command = [sys.executable, "-c", "from ejkernel.cli import main; main()", "cache", "ls", "--store", root, *options]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - start, done.stdout.count(b"\n")


def report(work: Path, sizes: tuple[int, ...], rounds: int, seconds: float) -> str:
    roots = {n: work / str(n) for n in sizes}
    for n, root in roots.items():
        fill(root, n)
    lines = ["| what | " + " | ".join(f"{n} entries" for n in sizes) + " | ratio to the smallest |"]
    lines.append("|---" * (len(sizes) + 2) + "|")
    for what, by_size in scaling(roots, rounds).items():
        cells = " | ".join(f"{by_size[n] * 1e3:.3f} ms" for n in sizes)
        lines.append(
            f"| {what} | {cells} | " + ", ".join(f"{by_size[n] / by_size[sizes[0]]:.2f}" for n in sizes[1:]) + " |"
        )
    lines += ["", "| `ejkernel cache ls` | time | lines |", "|---|---|---|"]
    for options in ((), ("--json",)):
        took, count = listing(roots[sizes[-1]], *options)
        lines.append(f"| {sizes[-1]} entries {' '.join(options)} | {took:.1f} s | {count} |")
    lines += ["", "| at once, 1 000 keys | first gets a second | puts a second | wrong reads |", "|---|---|---|---|"]
    for readers, writers in ((4, 0), (0, 4), (4, 4)):
        root = work / f"{readers}-{writers}"
        fill(root, 1000)
        totals = together(root, readers, writers, seconds)
        (reads, wrong), (writes, _) = totals["read"], totals["write"]
        lines.append(
            f"| {readers} readers, {writers} writers | {reads / seconds:.0f} | {writes / seconds:.0f} | {wrong} |"
        )
        assert not list(root.rglob(".tmp-*"))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results/")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        sizes, rounds, seconds = ((10, 100, 1000), 20, 1.0) if args.quick else (SIZES, 200, 4.0)
        text = report(Path(work), sizes, rounds, seconds)
    print(text)
    if args.write:
        today = datetime.datetime.now(datetime.UTC).date()
        machine = (
            f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
        )
        head = f"# The store, {today}\n\n`python benchmarks/store.py --write` on {machine}, local disk, shared.\n\n"
        (ROOT / "benchmarks" / "results" / f"{today}-cpu-store.md").write_text(head + text)


if __name__ == "__main__":
    main()
