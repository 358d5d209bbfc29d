import numpy as np
import pytest

from ejkernel.ops.tuning import robust
from ejkernel.ops.tuning.standings import Measurement

# Two-sided quantiles of Student's t from printed tables, by level and samples: of five and more, a fifth is cut at
# each end.
TABLE = {
    (0.95, 4): 12.706,
    (0.95, 5): 4.303,
    (0.95, 6): 3.182,
    (0.99, 6): 5.841,
    (0.99, 8): 4.032,
}


@pytest.mark.parametrize(("level", "samples"), TABLE)
def test_margins_are_student_quantiles_of_the_tables(level, samples):
    x = np.arange(float(samples))[:, None]
    cut = np.clip(x, x[1], x[-2])
    error = cut.std(ddof=1) * np.sqrt(samples) / (samples - 2)
    assert robust.margin(x, level)[0] / error == pytest.approx(TABLE[level, samples], rel=1e-3)


def test_one_hiccup_in_five_does_not_move_the_centre():
    x = np.array([[1.0], [1.01], [0.99], [1.0], [50.0]])
    assert robust.centre(x)[0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("n", [6, 16, 64])
def test_the_margin_covers_at_its_level(n):
    x = np.random.default_rng(n).normal(0, 1, (n, 4000))
    covered = np.abs(robust.centre(x)) <= robust.margin(x, 0.95)
    assert 0.93 <= covered.mean() <= 0.975


@pytest.mark.parametrize("n", [1, 2, 5])
def test_fewer_than_six_samples_have_no_interval(n):
    assert robust.median_interval(np.arange(n)) is None
    measured = Measurement.of(np.arange(1.0, n + 1), "wall")
    assert (measured.low_ms, measured.high_ms, measured.samples) == (None, None, n)
    assert str(measured) == f"{measured.median_ms:.4g} ms"


@pytest.mark.parametrize("n", [6, 16, 64])
def test_the_median_interval_covers_for_skewed_samples(n):
    x = np.random.default_rng(n).exponential(1, (3000, n))
    intervals = np.array([robust.median_interval(row) for row in x])
    covered = (intervals[:, 0] <= np.log(2)) & (np.log(2) <= intervals[:, 1])
    assert covered.mean() >= 0.94


def test_few_samples_have_no_margin():
    assert np.isinf(robust.margin(np.ones((3, 2)), 0.95)).all()
