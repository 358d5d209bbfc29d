"""Every figure of a Hopper GPU, in three parts of ten minutes each.

    python -m benchmarks.h200 --part 1 --out figures     # what has a goal, untuned
    python -m benchmarks.h200 --part 2 --out figures     # the GPU tests, drawn calls, what the guess goes by
    python -m benchmarks.h200 --part 3 --out figures     # packs, and the tuned calls
    python -m benchmarks.h200 --only "attention packed" --rounds 11

A part is a queue of processes by priority. They compile at the same time on all cores; one at a time has the device. A
figure is in `--out` as soon as it is there: `part1.md` (tables), `part1.jsonl`, `part1.log`. A process that crashes,
hangs, or is cut by `--seconds` is reported, and the others go on. What became of the goals is printed last, the missed
ones at the end.

Estimates for 16 cores, because no part has run as a whole yet: part 1 takes four to eight minutes, most of it for
compiling; part 2 five minutes of tests and two to four more; part 3 stops each tuning after a while, and
the same command goes on with what is not in `pack.json` yet.

    python -m benchmarks.h200 --part 1 --dry             # without a GPU: small calls, XLA in place of all backends
    python -m benchmarks.h200 --part 1 --compile-only    # with JAX's CUDA plugin, for an H200 that is not here

Beside JAX and NumPy this needs pydantic, scipy, filelock, rich and typer, its tests also pytest, pytest-xdist and
hypothesis; the columns of torch need torch. For a machine without an index, put them into a folder elsewhere, and the
folder on PYTHONPATH:

    pip install --target vendor --only-binary :all: --platform manylinux_2_28_x86_64 --python-version 3.12 pydantic ...
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from benchmarks import jobs
from benchmarks.jobs import Job

GROUPED = ("mixtral", "qwen3-30b", "deepseek-v3", "even-32", "mixtral-down", "qwen3-30b-down")
DECODING = ("decode-qwen3-30b", "decode-deepseek-v3")
LOSSES = ("4096 x 4096 to 128256", "32768 x 2560 to 128256", "16384 x 2048 to 32000")
TUNED = {"grouped_matmul": 240, "flash_attention": 100, "rms_norm": 30, "layer_norm": 30, "linear_cross_entropy": 40}
"""Seconds for each, which leave some for the figures of what was tuned."""


class Rows(NamedTuple):
    """Rows of a module, measured by so many processes."""

    module: str
    kind: str
    shares: int = 1


_PRODUCTS = [Rows("grouped_matmul", name) for name in (*GROUPED, *DECODING)]
_LOSSES = [Rows("loss", name) for name in LOSSES]
_NORMS = [Rows("norms", "rms_norm", 3), Rows("norms", "layer_norm", 3)]
PARTS = {
    1: [
        Rows("ceilings", "all"),
        *_PRODUCTS,
        *(Rows("attention", "first", 3), Rows("attention", "grouped", 2), Rows("attention", "packed", 3)),
        *(Rows("attention", kind) for kind in ("values", "dims", "windows", "cap", "short", "few")),
        *(*_LOSSES, *_NORMS),
    ],
    2: [
        Rows("attention", "drawn", 10),
        Rows("attention", "rule", 4),
        Rows("attention", "masks"),
        Rows("attention", "biases", 2),
    ],
    3: [*_PRODUCTS, Rows("attention", "first", 3), *_LOSSES, *_NORMS],
}


def chosen(options: argparse.Namespace, lock: str) -> list[Job]:
    """The jobs that are asked for; without a part, only those with figures, each once."""
    found = queue(options.part, options, lock)
    if options.part is None:
        shares = [_job(rows, i, options, lock) for part in PARTS.values() for rows in part for i in range(rows.shares)]
        found = list({job.name: job for job in shares}.values())
    return [job for job in found if not options.only or any(_matches(job.name, text) for text in options.only)]


def queue(part: int | None, options: argparse.Namespace, lock: str) -> list[Job]:
    """The jobs of a part, the most important first."""
    python, cores = sys.executable, os.cpu_count() or 1
    first: list[Job] = []
    if part == 2:
        tests = ["--collect-only"] if options.dry else ["-n", f"{max(1, cores - 2)}"]
        # The second plugin is one that others install: it warns of workers, and warnings are errors.
        plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark")
        command = (python, "-m", "pytest", "-m", "gpu", "-q", *plugins, *tests)
        first = [Job("tests", command, 420, cores)]
    elif part == 3:
        how = ["--list"] if options.dry else ["--out", str(options.out / "pack.json")]
        command = (python, "-m", "ejkernel", "tune")
        first = [Job(f"tune {op}", (*command, op, "--suite", *how), limit, cores) for op, limit in TUNED.items()]
    shares = [_job(rows, i, options, lock) for rows in PARTS.get(part, ()) for i in range(rows.shares)]
    return shares if options.compile_only else [*first, *shares]


def _job(rows: Rows, i: int, options: argparse.Namespace, lock: str) -> Job:
    share = f" {i + 1}/{rows.shares}" if rows.shares > 1 else ""
    asked = ["--rows", rows.module, rows.kind, f"{i}/{rows.shares}", "--rounds", f"{options.rounds}", "--lock", lock]
    asked += ["--out", str(options.out), *(["--dry"] if options.dry else [])]
    asked += ["--compile-only"] if options.compile_only else []
    command = (sys.executable, "-m", "benchmarks.h200", *asked)
    return Job(f"{rows.module} {rows.kind}{share}", command, options.job_seconds)


def measure(options: argparse.Namespace) -> None:
    """What one process does: some rows of one kind."""
    if (pack := options.out / "pack.json").exists():
        os.environ["EJKERNEL_CACHE_PACKS"] = str(pack)
    from benchmarks import figures
    from ejkernel.ops.utils import targets

    module, kind, share = options.rows
    first, shares = map(int, share.split("/"))
    rows = importlib.import_module(f"benchmarks.rows.{module}").rows(kind, options.dry)
    rows = rows[len(rows) * first // shares : len(rows) * (first + 1) // shares]
    rows = rows[:2] if options.dry else rows
    target = targets.find("sm_90a") if options.compile_only else None
    if target is None:
        print(figures.MARK + json.dumps({"heading": figures.heading(options.rounds)}), flush=True)
    settings = {"rounds": options.rounds, "threads": 2 if target else 4, "lock": options.lock, "target": target}
    figures.run(rows, figures.emit, **settings)


def lead(options: argparse.Namespace) -> int:
    """Runs a queue and shows what came of it."""
    from benchmarks import figures

    name = f"part{options.part}" if options.part else "figures"
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[figures.Figure] = []
    about = [f"`{' '.join(sys.orig_argv[1:])}` at {_commit()}"]
    notes = {"dry": "A dry run: small calls, by XLA.", "compile_only": "Compiled only, for an H200 that is not here."}
    about += [note for option, note in notes.items() if getattr(options, option)]

    with (
        tempfile.TemporaryDirectory() as scratch,
        (options.out / f"{name}.log").open("w") as log,
        (options.out / f"{name}.jsonl").open("w") as lines,
    ):
        os.environ |= {"EJKERNEL_CACHE_DIR": f"{scratch}/store", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

        def keep(line: str) -> None:
            print(line, file=lines, flush=True)
            fields = json.loads(line)
            if "heading" in fields:
                about.extend({fields["heading"]} - set(about))
            else:
                found.append(figures.Figure(**fields))
            (options.out / f"{name}.md").write_text("\n\n".join([*about, figures.tables(found)]) + "\n")

        wanted = chosen(options, f"{scratch}/turn")
        limits = {"seconds": options.seconds, "cores": os.cpu_count() or 1}
        outcomes = jobs.run(wanted, **limits, log=log, mark=figures.MARK, found=keep)
    print(summary(found, outcomes, about))
    return 0 if all(outcome.good for outcome in outcomes) else 1


def summary(found: list, outcomes: list[jobs.Outcome], about: list[str]) -> str:
    """The goals, met ones first, and what went wrong: what is last is seen."""
    verdicts = [verdict for figure in found for verdict in figure.verdicts()]
    met, missed = ([text for good, text in verdicts if good is wanted] for wanted in (True, False))
    failed: dict[str, list[str]] = {}
    for figure in found:
        for name, why in figure.notes.items():
            if not why.startswith("refused"):
                failed.setdefault(f"{name} {why}"[:160], []).append(f"{figure.table} | {figure.name}")
    took = ", ".join(f"{outcome.name} {outcome.seconds:.0f} s" for outcome in outcomes if outcome.good)
    bad = [str(outcome) for outcome in outcomes if not outcome.good]
    end = f"{len(found)} figures; {len(met)} of {len(verdicts)} goals met; {len(bad)} of {len(outcomes)} jobs not done"
    once = [f"{why}: {rows[0]}" + (f" and {len(rows) - 1} more" if rows[1:] else "") for why, rows in failed.items()]
    return "\n".join([*about, f"done: {took}", *met, *once, *bad, *missed, end])


def _matches(name: str, text: str) -> bool:
    return text in name or fnmatch.fnmatchcase(name, text)


def _commit() -> str:
    git = shutil.which("git")
    command = [git, "describe", "--always", "--dirty"] if git else ["true"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "an unknown commit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=list(PARTS), help="without it, all jobs that --only names")
    parser.add_argument("--only", action="append", help="jobs with this in their name, or that match it with *")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("figures"), help="a folder")
    parser.add_argument("--seconds", type=float, default=560, help="for all jobs together")
    parser.add_argument("--job-seconds", type=float, default=300, help="for one of them")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dry", action="store_true", help="small calls, with XLA in place of the backends")
    parser.add_argument("--compile-only", action="store_true", help="for an H200 that is not here")
    parser.add_argument("--list", action="store_true", help="only say which jobs there are")
    parser.add_argument("--rows", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        measure(options)
        return
    if not options.part and not options.only and not options.list:
        parser.error("--part or --only says what to measure")
    if options.list:
        print("\n".join(f"{part}: {job.name}" for part in PARTS for job in queue(part, options, "")))
        return
    # Without starting JAX: this process must not hold the device.
    if not (options.dry or options.compile_only or pathlib.Path("/dev/nvidiactl").exists()):
        parser.error("there is no GPU here; --dry tries it with small calls, --compile-only compiles for an H200")
    sys.exit(lead(options))


if __name__ == "__main__":
    main()
