"""What a setting that was not run would do: a trend, what its neighbours deviate from it, and how wrong that can be.

With h = log2(1 + heads) and n = log2(state),

    quality = g(a + b h + c n + d h n) + correction(h, n)

g is the logistic function for retrieval (as a share of the teacher's: near nothing, a steep part, then flat) and the
identity for anything else. The correction is the mean residual of the measured neighbours, weighted by a Gaussian of
their distance in doublings (kriging with a fixed range), so that the surface passes close to what was measured. Two
sources of error make the interval: the seeds are drawn again (bootstrap), and to each redrawn prediction an error is
added that the surface made when a cell was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

RIDGE = 0.02  # keeps slopes finite where all cells are at 0 % or at 100 %
RANGE = 1.0  # of the correction, in doublings
NUGGET = 0.1  # share of a residual that counts as noise of its own cell
LEAST_SCALE = 0.1  # of a share's error: at 0 % and 100 % it is smaller than in the middle, but not nothing
N_RESAMPLES = 400


class TooFewCells(ValueError):
    """A surface cannot be fitted, or not be judged."""


class Prediction(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Surface:
    """A fitted surface over heads and states.

    ``heads_S`` and ``d_state_S`` say where the S settings are, ``value_SE`` what each of the E seeds gave (NaN where a
    cell is not done). ``share``: values lie between 0 and 1. Raises TooFewCells when there are not at least two
    settings more than the trend has parameters.
    """

    heads_S: Array
    d_state_S: Array
    value_SE: Array
    share: bool

    def __post_init__(self) -> None:
        n_heads, n_states = len(set(self.heads_S)), len(set(self.d_state_S))
        n_parameters = (1 + (n_heads > 1)) * (1 + (n_states > 1))
        if n_heads < 3 or len(self.heads_S) < n_parameters + 2:
            raise TooFewCells(
                f"{len(self.heads_S)} settings with {n_heads} numbers of heads are too few to predict others from; "
                f"it takes {max(n_parameters + 2, 4)} settings with 3 numbers of heads."
            )

    def predict(self, heads: Sequence[int], d_state: Sequence[int], seed: int = 0) -> list[Prediction]:
        """Predictions with their 95 % intervals."""
        at = _features(np.array(heads, float), np.array(d_state, float))
        draw = np.random.default_rng(seed)
        here = _features(self.heads_S, self.d_state_S)
        error_S = self._left_out(standardised=True)
        values_RC = []
        for _ in range(N_RESAMPLES):
            values_C = _fit_predict(here, self._redrawn(draw), at, self.share)
            error_C = draw.choice(error_S, size=len(values_C))
            values_RC.append(values_C + error_C * _scale(values_C, self.share))
        low_C, high_C = np.quantile(self._clipped(np.array(values_RC)), (0.025, 0.975), axis=0)
        value_C = self._clipped(_fit_predict(here, self._mean_S, at, self.share))
        return [Prediction(*map(float, triple)) for triple in zip(value_C, low_C, high_C)]

    @property
    def error(self) -> float:
        """Mean distance between a setting's value and its prediction from all the others."""
        return float(np.abs(self._left_out(standardised=False)).mean())

    @property
    def _mean_S(self) -> Array:
        return np.nanmean(self.value_SE, axis=1)

    def _redrawn(self, draw: np.random.Generator) -> Array:
        """Means over seeds drawn with replacement, the same for all settings; where none of them is done, the mean."""
        n_seeds = self.value_SE.shape[1]
        picked_SE = self.value_SE[:, draw.integers(n_seeds, size=n_seeds)]
        n_S = (~np.isnan(picked_SE)).sum(1)
        return np.where(n_S > 0, np.nansum(picked_SE, axis=1) / np.maximum(n_S, 1), self._mean_S)

    def _left_out(self, *, standardised: bool) -> Array:
        here, value_S = _features(self.heads_S, self.d_state_S), self._mean_S
        errors = []
        for i in range(len(value_S)):
            rest = np.arange(len(value_S)) != i
            found = self._clipped(_fit_predict(here[rest], value_S[rest], here[~rest], self.share))[0]
            errors.append((value_S[i] - found) / (_scale(found, self.share) if standardised else 1.0))
        return np.array(errors)

    def _clipped(self, values: Array) -> Array:
        return np.clip(values, 0.0, 1.0) if self.share else values


def _features(heads: Array, d_state: Array) -> Array:
    """[C, 2]: doublings of heads and of the state."""
    return np.stack([np.log2(1 + heads), np.log2(d_state)], axis=1)


def _fit_predict(here_S2: Array, value_S: Array, at_C2: Array, share: bool) -> Array:
    centre_2 = here_S2.mean(0)
    trend_S, trend_C = (_design(where - centre_2) for where in (here_S2, at_C2))
    weights = _logistic_fit(trend_S, value_S) if share else _least_squares(trend_S, value_S)
    fitted_S, fitted_C = (_link(trend @ weights, share) for trend in (trend_S, trend_C))
    near_SS = _nearness(here_S2, here_S2) + NUGGET * np.eye(len(value_S))
    return fitted_C + _nearness(at_C2, here_S2) @ np.linalg.solve(near_SS, value_S - fitted_S)


def _design(where: Array) -> Array:
    return np.stack([np.ones(len(where)), where[:, 0], where[:, 1], where[:, 0] * where[:, 1]], axis=1)


def _penalty() -> Array:
    return RIDGE * np.diag([0.0, 1.0, 1.0, 1.0])


def _least_squares(trend: Array, value_S: Array) -> Array:
    return np.linalg.solve(trend.T @ trend + _penalty(), trend.T @ value_S)


def _logistic_fit(trend: Array, value_S: Array) -> Array:
    """Newton's method for the likelihood of shares (Papke and Wooldridge, 1996), with a small penalty on slopes."""
    weights = np.zeros(4)
    for _ in range(50):
        share_S = _link(trend @ weights, share=True)
        slope_S = np.maximum(share_S * (1 - share_S), 1e-4)
        gradient = trend.T @ (value_S - share_S) - _penalty() @ weights
        step = np.linalg.solve((trend * slope_S[:, None]).T @ trend + _penalty(), gradient)
        weights = weights + np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-6:
            break
    return weights


def _link(eta: Array, share: bool) -> Array:
    return 1 / (1 + np.exp(-np.clip(eta, -30.0, 30.0))) if share else eta


def _nearness(a: Array, b: Array) -> Array:
    return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * RANGE**2))


def _scale(value: Any, share: bool) -> Any:
    """Errors of a share are greatest in the middle; others are alike everywhere."""
    if not share:
        return np.ones_like(value)
    inside = np.clip(value, 0.0, 1.0)
    return np.maximum(np.sqrt(inside * (1 - inside)), LEAST_SCALE)
