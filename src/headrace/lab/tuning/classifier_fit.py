"""Fits the complexity classifier of routing: a logistic regression on the features of requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.routing.complexity import FEATURES, Classifier

Floats = NDArray[np.float64]
RIDGE: Final = 3.0  # against weights that a few questions would make large
_ROUNDS: Final = 50  # of Newton's method; it takes about ten


def fitted(values: Floats, labels: Floats, counts: Floats, ridge: float = RIDGE) -> Floats:
    """Fit a logistic regression; the last weight is the bias. `counts` weighs the rows."""
    scale = np.maximum(values.std(axis=0), 1e-9)
    middle = values.mean(axis=0)
    rows = np.column_stack([(values - middle) / scale, np.ones(len(values))])
    penalty = np.full(rows.shape[1], ridge)
    penalty[-1] = 1e-6
    weights = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        likely = 1.0 / (1.0 + np.exp(-np.clip(rows @ weights, -30.0, 30.0)))
        slope = rows.T @ (counts * (labels - likely)) - penalty * weights
        bend = (rows * (counts * likely * (1.0 - likely))[:, None]).T @ rows + np.diag(penalty)
        step = np.linalg.solve(bend, slope)
        weights += step
        if float(np.abs(step).max()) < 1e-10:
            break
    plain = weights[:-1] / scale
    return np.append(plain, weights[-1] - float(plain @ middle))


def balanced(labels: Floats) -> Floats:
    """Return counts that give both labels the same weight."""
    ones = max(float(labels.sum()), 1.0)
    zeros = max(len(labels) - float(labels.sum()), 1.0)
    return np.where(labels > 0, len(labels) / (2 * ones), len(labels) / (2 * zeros))


def ranked(scores: Floats, labels: Floats) -> float:
    """Return how often a complex question scores above a simple one. Ties count half."""
    above, below = scores[labels > 0], scores[labels == 0]
    if not len(above) or not len(below):
        return 0.5
    difference = above[:, None] - below[None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


def fit_classifier(features: Sequence[Sequence[float]], labels: Floats, made: dict[str, Any]) -> Classifier:
    """Fit a classifier; labels are 1 for complex requests. `made` says how, for readers of its file."""
    values = np.array(features, dtype=np.float64).reshape(len(features), len(FEATURES))
    *weights, bias = (round(float(each), 5) for each in fitted(values, labels, balanced(labels)))
    return Classifier(dict(zip(FEATURES, weights, strict=True)), bias, made)


def scores_of(classifier: Classifier, features: Sequence[Sequence[float]]) -> Floats:
    return np.array([classifier.score(list(each)) for each in features], dtype=np.float64)
