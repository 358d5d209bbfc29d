"""How rows are measured and shown, on a CPU with small functions."""

import argparse
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import figures, h200
from benchmarks.figures import Contender, Figure, Goal, Row
from benchmarks.jobs import Outcome
from benchmarks.rows import attention, grouped_matmul, loss, norms


def row(goals=(), **contenders):
    made = {name: c if isinstance(c, Contender) else Contender(c) for name, c in contenders.items()}
    ones = lambda: (jnp.arange(1.0, 9.0),)
    return Row(table="Doubling", name="eight", inputs=ones, contenders=made, goals=tuple(goals), work=8e9)


def measured(given, **options):
    found = []
    figures.run([given], found.append, rounds=2, threads=2, **options)
    return found[0]


def fails(x):
    raise ValueError("no such thing")


def test_a_contender_that_fails_is_a_note_and_the_others_have_figures():
    figure = measured(row(untuned=lambda x: 2 * x, other=lambda x: x + x, broken=fails))
    assert set(figure.ms) == {"untuned", "other"}
    assert figure.notes == {"broken": "failed: ValueError: no such thing"}
    assert figure.timer == "wall"


def test_a_result_that_differs_from_the_first_is_noted():
    figure = measured(row(untuned=lambda x: 2 * x, wrong=lambda x: 3 * x, other=Contender(lambda x: -x, same=False)))
    assert list(figure.notes) == ["wrong"]
    assert figure.notes["wrong"] == "differs: 5.0e-01 from untuned"


def test_a_result_that_is_no_number_is_noted():
    assert "differs: nan" in measured(row(untuned=lambda x: 2 * x, wrong=lambda x: x / 0 * 0)).notes["wrong"]


def test_what_runs_before_is_not_compiled_with_what_is_timed():
    traced = []
    after = Contender(lambda x, y: traced.append(x.shape) or x + y, after=lambda x: (x[:4], x[4:]), same=False)
    assert set(measured(row(untuned=lambda x: x, after=after)).ms) == {"untuned", "after"}
    assert traced == [(4,)]


def test_data_that_cannot_be_made_fail_the_row_alone():
    found, good = [], row(untuned=lambda x: x)
    lost = replace(good, inputs=lambda: (jax.pure_callback(fails, jax.ShapeDtypeStruct((8,), "float32"), 1),))
    figures.run([lost, good], found.append, rounds=1, threads=1)
    assert found[0].notes["data"].startswith("failed: ")
    assert [bool(figure.ms) for figure in found] == [False, True]


@pytest.mark.parametrize(
    ("goal", "line"),
    [
        (Goal(1.5, ("cudnn", "triton")), "met, 1.5: untuned >= 1.5 x cudnn or triton"),
        (Goal(2.0, ("triton",)), "met, 2: untuned >= 2 x triton"),
        (Goal(1.6, ("cudnn",)), "missed by 6.2%, 1.5: untuned >= 1.6 x cudnn"),
        (Goal(5.0, what="rate"), "missed by 20.0%, 4: untuned >= 5"),
        (Goal(4.0, what="rate"), "met, 4: untuned >= 4"),
        (Goal(3.0, what="MB"), "met, 2: untuned <= 3 MB"),
        (Goal(1.6, what="MB"), "missed by 25.0%, 2: untuned <= 1.6 MB"),
        (Goal(1.0, ("torch",)), "not measured: untuned >= 1 x torch"),
        (Goal(1.0, ("cudnn",), of="tuned"), "not measured: tuned >= 1 x cudnn"),
    ],
)
def test_goals_say_by_how_much_they_are_met_or_missed(goal, line):
    figure = Figure(table="t", name="n", work=8e9, unit="TFLOP/s", memory={"untuned": 2_000_000})
    figure.ms = {"untuned": 2.0, "cudnn": 3.0, "triton": 4.0}
    figure.judge([goal])
    ((met, said),) = figure.verdicts()
    assert said == f"{line} | t | n"
    assert met is line.startswith("met")


def test_tables_show_rates_memory_and_what_did_not_run():
    figure = Figure(table="Doubling", name="eight", work=8e9, unit="TFLOP/s", timer="cupti", ms={"untuned": 2.0})
    figure.memory, figure.notes = {"untuned": 3 << 20}, {"cudnn": "refused: it is not there"}
    assert figures.tables([figure]).splitlines() == [
        "### Doubling, ms by cupti (TFLOP/s)",
        "",
        "| call | untuned | cudnn | goals |",
        "|---|---|---|---|",
        "| eight | 2.0000 (4, 3 MiB) | refused |  |",
        "",
        "- eight, cudnn: refused: it is not there",
    ]


def test_what_went_wrong_and_the_missed_goals_come_last():
    figure = Figure(table="t", name="n", work=0, unit="", ms={"untuned": 1.0, "cudnn": 1.1}, notes={"x": "failed: y"})
    figure.judge([Goal(2.0, ("cudnn",)), Goal(1.0, ("cudnn",))])
    lines = h200.summary([figure], [Outcome("good", "done"), Outcome("bad", "failed with SIGABRT")], ["heading"])
    order = [
        "heading",
        "done: good",
        "met, 1.1",
        "x failed: y: t | n",
        "bad: failed",
        "missed by 45.0%",
        "1 figures; 1 of 2",
    ]
    assert [line[: len(start)] for line, start in zip(lines.splitlines(), order, strict=True)] == order


@pytest.mark.parametrize(
    ("part", "only", "names"),
    [
        (None, ["loss 16384"], ["loss 16384 x 2048 to 32000"]),  # In two parts, measured once.
        (3, ["*rms_norm"], ["tune rms_norm"]),
        (None, ["rms_norm"], [f"norms rms_norm {i}/3" for i in (1, 2, 3)]),
        (2, ["tests", "masks"], ["tests", "attention masks"]),
        (1, ["tune", "tests"], []),
    ],
)
def test_jobs_are_chosen_by_part_and_name(part, only, names, tmp_path):
    options = argparse.Namespace(
        part=part, only=only, out=tmp_path, rounds=3, job_seconds=9, dry=True, compile_only=False
    )
    assert [job.name for job in h200.chosen(options, "turn")] == names


def test_the_parts_name_every_row():
    kinds = {}
    for rows in itertools.chain(*h200.PARTS.values()):
        kinds.setdefault(rows.module, set()).add(rows.kind)
    assert kinds["attention"] == {*attention.CALLS, "drawn"}
    assert kinds["grouped_matmul"] == {*grouped_matmul.BY_NAME}
    assert kinds["loss"] == {*loss.BY_NAME}
    assert kinds["norms"] == {*norms.KERNELS}
