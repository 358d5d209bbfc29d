"""Robust estimates: the centre of noisy samples with a right tail, and how far it may be off.

Samples are rows, quantities are columns. The centre is the mean without the lowest and the highest fifth: a disturbance
of every fifth sample does not move it, and with normal noise it needs two thirds of the samples of a median.
"""

import math

import numpy as np


def centre(x: np.ndarray) -> np.ndarray:
    """Returns the trimmed mean of each column."""
    cut = _cut(len(x))
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def margin(x: np.ndarray, level: float) -> np.ndarray:
    """Returns the half-width of the interval around `centre(x)` at confidence `level`; infinite below four rows."""
    from scipy.special import stdtrit  # Imported here, because only tuning needs it.

    n, cut = len(x), _cut(len(x))
    if n < 4:
        return np.full(x.shape[1], math.inf)
    ordered = np.sort(x, axis=0)
    winsorized = np.clip(x, ordered[cut], ordered[n - cut - 1])
    error = winsorized.std(axis=0, ddof=1) * math.sqrt(n) / (n - 2 * cut)
    return stdtrit(n - 2 * cut - 1, (1 + level) / 2) * error


FOR_AN_INTERVAL = 6
"""The fewest samples whose extremes enclose the median at 95 %: 1 - 2 / 2**6 is 0.97, with five it is 0.94."""


def median_interval(x: np.ndarray) -> tuple[float, float] | None:
    """Returns the samples that enclose the median at 95 %, whatever the distribution; None if there are too few."""
    if len(x) < FOR_AN_INTERVAL:
        return None
    ordered = np.sort(x)
    skip = max(0, math.floor((len(x) - 1) / 2 - 0.98 * math.sqrt(len(x))))
    return float(ordered[skip]), float(ordered[-1 - skip])


def mad(x: np.ndarray) -> float:
    """Returns the median absolute deviation from the median."""
    return float(np.median(np.abs(x - np.median(x))))


def _cut(n: int) -> int:
    """Returns how many samples to leave out at each end: a fifth, and at least one as soon as one remains."""
    return max(1, n // 5) if n >= 3 else 0
