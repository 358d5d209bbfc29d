"""What compiles for devices that are not here, with the memory that it needs: `python -m benchmarks.targets`.

Writes the whole table to --out, and a summary between the marks in docs/targets.md.
"""

import argparse
import concurrent.futures
import importlib.metadata
import multiprocessing
import os
import re
import time
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Before JAX is imported.

from ejkernel.ops.utils.targets import TARGETS
from tests.targets import plan

ROOT = Path(__file__).parents[1]
NONE = "-"
EACH = 30
"""Cases that one process compiles."""
MARKS = ("<!-- table -->", "<!-- /table -->")


def attempt(case):
    """The parts of one case: name, temporary bytes or None, and what was said instead."""
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        parts = plan.compiled(case)
    except Exception as error:  # noqa: BLE001 - a compiler's error is a cell of the table.
        return case, [(case.op_id, None, f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}")]
    return case, [(p.op_id, p.program and p.program.temp_bytes, p.refused and f"refused: {p.refused}") for p in parts]


def mib(size):
    return f"{size / 2**20:.0f}" if size >= 2**20 else f"{size / 2**20:.1f}"


def rows_of(results):
    """Cells by row and target: a row is an operation, a backend and a workload; parts of a name are numbered."""
    rows = {}
    for case, parts in results:
        names = [op_id for op_id, *_ in parts]
        for place, (op_id, temp, text) in enumerate(parts):
            other = " (dlhs)" if names.index(op_id) < place else ""
            key = (op_id + other, case.platform, case.workload)
            rows.setdefault(key, {})[case.target] = mib(temp) if text is None else text
    return rows


def table(rows):
    lines = [
        "| operation | backend | workload | " + " | ".join(TARGETS) + " |",
        "|---|---|---|" + "---|" * len(TARGETS),
    ]
    notes = []
    for (op_id, platform, workload), cells in sorted(rows.items()):
        shown = []
        for target in TARGETS:
            text = cells.get(target, NONE)
            if ": " in text:
                notes.append(text) if text not in notes else None
                text = f"{text.partition(':')[0]} ({notes.index(text) + 1})"
            shown.append(text)
        lines.append(f"| {op_id} | {platform} | {workload} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", *(f"{n}. {note}" for n, note in enumerate(notes, 1))])


def summary(rows):
    """How many calls of each backend compile, and the most temporary memory of one."""
    lines = ["| operation | backend | " + " | ".join(TARGETS) + " |", "|---|---|" + "---|" * len(TARGETS)]
    for op_id, platform in dict.fromkeys((op_id.removesuffix(" (dlhs)"), p) for op_id, p, _ in sorted(rows)):
        shown = []
        for target in TARGETS:
            mine = [(o.removesuffix(" (dlhs)"), p) == (op_id, platform) for o, p, _ in rows]
            cells = [c[target] for c, own in zip(rows.values(), mine, strict=True) if own and target in c]
            cells = [c for c in cells if not c.startswith("refused")]
            good = [float(c) for c in cells if ":" not in c]
            shown.append(f"{len(good)} of {len(cells)}, {max(good):g} MiB" if good else NONE if not cells else "0")
        lines.append(f"| {op_id} | {platform} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def heading(command, seconds):
    names = ("jax", "libtpu", "jax-cuda13-plugin")
    all_of = f"All workloads are compiled for {', '.join(plan.THOROUGH)}, one in three for the others."
    which = "Only the first workload of each operation is compiled." if "--first" in command else all_of
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"""# What compiles for devices that are not here

`{command}`, {versions}; {seconds:.0f} s on two cores.
Each cell is one compiled program with the guess of its backend: the MiB of temporary memory beside arguments and
results. "{NONE}": the backend is not for this device, or the workload is not compiled for it. {which} cuDNN is left
out: JAX asks the GPU itself whether it can be used.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/2026-11-18-targets.md")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--first", action="store_true", help="only the first workload of each operation, without XLA's own"
    )
    parser.add_argument("--only", default="", help="only cases with this in their name; nothing is written")
    options = parser.parse_args()
    started = time.monotonic()
    chosen = [case for case in plan.cases() if options.only in str(case)]
    if options.first:
        first = lambda case: next(iter(plan.workloads(case.op_id, plan.kind_of(TARGETS[case.target]))))
        chosen = [case for case in chosen if case.workload == first(case) and case.platform != "xla"]
    spawn = multiprocessing.get_context("spawn")
    results = []
    # Compilers keep what they compiled: new processes now and then bound the memory. Not by `max_tasks_per_child`, with
    # which a pool may wait for ever for a process that it has ended (Python 3.12, python/cpython#115634).
    for first in range(0, len(chosen), EACH * options.jobs):
        with concurrent.futures.ProcessPoolExecutor(options.jobs, spawn) as pool:
            for result in pool.map(attempt, chosen[first : first + EACH * options.jobs]):
                results.append(result)
                print(f"{len(results)} of {len(chosen)}: {result[0]}", flush=True)
    rows = rows_of(results)
    if options.only:
        print(table(rows))
        return
    command = "python -m benchmarks.targets" + (" --first" if options.first else "")
    options.out.write_text(f"{heading(command, time.monotonic() - started)}\n{table(rows).rstrip()}\n")
    page = ROOT / "docs/targets.md"
    new = f"{MARKS[0]}\n{summary(rows)}\n{MARKS[1]}"
    page.write_text(re.sub(f"{MARKS[0]}.*?{MARKS[1]}", lambda _: new, page.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
