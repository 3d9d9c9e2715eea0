"""Splits the neurons of a dense gated MLP into shared experts, routed experts and a router. Reads and writes no files.

The ideas are those of MoEfication (Zhang et al., 2022: neurons that fire together form an expert), LLaMA-MoE (Zhu et
al., 2024: gated MLPs, some neurons stay for every token) and CMoE (Pei et al., 2025: shared experts from the neurons
that fire most, balanced clusters, an analytic router, no training). Here the router is a ridge regression of the size
of what each expert would add, and `down` is fitted to the outputs of the whole MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.compress.layer_pass import F32, LayerPass
from headrace.compress.recipe import SplitPlan
from headrace.compress.reshape.output_fit import fitted

# A chosen expert must count with weight 1, as its neurons do in the dense MLP, while sigmoids choose it. With logits
# this small every weight, twice a sigmoid, is 1 within less than bf16 rounds, and f32 still tells them apart.
LOGIT_SIZE: Final = 2.0**-12
WEIGHT_SCALE: Final = 2.0
_SAMPLES: Final = 2048  # tokens whose activations are clustered
SPLIT_ROWS: Final = 2048  # computed together
_ROUNDS: Final = 12  # of clustering
_RIDGE: Final = 1e-2  # of the mean square of the router's inputs
_RIDGES: Final = (1e-2, 1e-1, 1.0)  # of the mean square of the neurons: how closely `down` keeps to what it was
_HELD_OUT: Final = 10  # every tenth of the tokens, the last ones, is not fitted to

Neurons = NDArray[np.intp]
Groups = NDArray[np.intp]  # [experts, neurons of an expert]


class SplitMlp(NamedTuple):
    tensors: dict[str, F32]  # "mlp.router", "mlp.experts.0.down", ...
    outputs: F32  # of the mixture, for the rows that it was made on
    held_out: slice  # rows that nothing was fitted to; the sizes below are theirs
    routed_size: float
    kept: float
    best: float


def split_mlp(layer: LayerPass, hidden: F32, plan: SplitPlan) -> SplitMlp:
    """Split the MLP of a layer. `hidden` are the states behind its attention."""
    return _Split(layer, hidden, plan).run()


class _Split:
    def __init__(self, layer: LayerPass, hidden: F32, plan: SplitPlan) -> None:
        self._layer = layer
        self._hidden = hidden
        self._plan = plan
        self._down = layer.tensors["mlp.down"]
        self._size = self._down.shape[1] // plan.parts
        held_out = len(hidden) // _HELD_OUT
        self._fitted_to = slice(0, len(hidden) - held_out)
        self._held_out = slice(self._fitted_to.stop if held_out else 0, len(hidden))

    def run(self) -> SplitMlp:
        sizes = self._contributions(self._hidden[self._fitted_to][:: max(1, len(self._hidden) // _SAMPLES)])
        shared = most_active(sizes, self._plan.shared * self._size)
        every: Neurons = np.arange(sizes.shape[1], dtype=np.intp)
        rest = np.setdiff1d(every, shared)
        groups = rest[balanced_clusters(sizes[:, rest].T, self._plan.routed)]
        router, bias = self._router(groups)
        owner = np.full(sizes.shape[1], self._plan.routed)  # the last column of a choice is true: shared
        for expert, group in enumerate(groups):
            owner[group] = expert
        down = self._down if self._plan.active == self._plan.routed else self._fit(router, bias, owner)
        found = self._measured(groups, owner, router, bias, down)
        # With all experts on there is nothing to choose, and every weight is 1 exactly.
        logit = 0.0 if self._plan.active == self._plan.routed else LOGIT_SIZE / max(found.logit, 1e-30)
        tensors = {
            "mlp.router": router * np.float32(logit),
            "mlp.router_bias": bias * np.float32(logit / 4),  # the slope of a sigmoid
            **self._expert("mlp.shared", shared, down),
        }
        for expert, group in enumerate(groups):
            tensors |= self._expert(f"mlp.experts.{expert}", group, down)
        return SplitMlp(tensors, found.outputs, self._held_out, found.routed_size, found.kept, found.best)

    def _expert(self, name: str, neurons: Neurons, down: F32) -> dict[str, F32]:
        gate, up = np.split(self._layer.tensors["mlp.gate_up"], 2)
        return {f"{name}.gate_up": np.concatenate([gate[neurons], up[neurons]]), f"{name}.down": down[:, neurons]}

    def _chunks(self, part: slice) -> Iterator[tuple[slice, F32, F32]]:
        """Yield rows of a part of all, the inputs of the MLP and those of `down`."""
        for begin in range(part.start, part.stop, SPLIT_ROWS):
            rows = slice(begin, min(begin + SPLIT_ROWS, part.stop))
            inputs = self._layer.mlp_inputs(self._hidden[rows])
            yield rows, inputs, self._layer.open_mlp("mlp", inputs)

    def _contributions(self, hidden: F32) -> F32:
        """Return how much each neuron adds to the output, [tokens, neurons]."""
        inner = self._layer.open_mlp("mlp", self._layer.mlp_inputs(hidden))
        return np.abs(inner) * np.linalg.norm(self._down, axis=0)

    def _expert_sizes(self, inner: F32, groups: Groups) -> F32:
        """Return the size of what each expert adds, [tokens, experts]."""
        outputs = (inner[:, group] @ self._down[:, group].T for group in groups)
        return np.stack([np.square(each).sum(axis=1) for each in outputs], axis=1)

    def _router(self, groups: Groups) -> tuple[F32, F32]:
        """Return the weights and biases whose scores are closest to the roots of the experts' sizes."""
        width = self._down.shape[0] + 1
        gram, cross = np.zeros((width, width)), np.zeros((width, len(groups)))
        for _, inputs, inner in self._chunks(self._fitted_to):
            wide = np.concatenate([inputs, np.ones((len(inputs), 1), dtype=np.float32)], axis=1)
            target = np.sqrt(self._expert_sizes(inner, groups))
            gram += wide.T @ wide
            cross += wide.T @ (target - target.mean(axis=1, keepdims=True))  # only differences choose
        gram[np.diag_indices_from(gram)] += _RIDGE * max(float(np.diag(gram).mean()), 1e-30)
        found = np.linalg.solve(gram, cross).T.astype(np.float32)
        return np.ascontiguousarray(found[:, :-1]), np.ascontiguousarray(found[:, -1])

    def _chosen(self, scores: F32) -> NDArray[np.bool_]:
        """Return which experts are on, [tokens, experts + 1]; the last column is of the shared ones."""
        found = np.zeros((len(scores), scores.shape[1] + 1), dtype=np.bool_)
        found[:, -1] = True
        np.put_along_axis(found, np.argsort(-scores, axis=1, kind="stable")[:, : self._plan.active], True, axis=1)
        return found

    def _fit(self, router: F32, bias: F32, owner: Neurons) -> F32:
        """Return `down` fitted to the outputs of all neurons, when only those of chosen experts are on. What it was is
        kept where no fit is better on the tokens that were held out."""
        neurons = self._down.shape[1]
        gram = np.zeros((neurons, neurons), dtype=np.float32)
        cross = np.zeros((neurons, len(self._down)), dtype=np.float32)
        for _, inputs, inner in self._chunks(self._fitted_to):
            on = inner * self._chosen(inputs @ router.T + bias)[:, owner]
            gram += on.T @ on
            cross += on.T @ (inner @ self._down.T)
        best, least = self._down, self._error(self._down, router, bias, owner)
        for ridge in _RIDGES:
            down = fitted(self._down, gram, cross, ridge)
            error = self._error(down, router, bias, owner)
            if error < least:
                best, least = down, error
        return best

    def _error(self, down: F32, router: F32, bias: F32, owner: Neurons) -> float:
        total = 0.0
        for _, inputs, inner in self._chunks(self._held_out):
            on = inner * self._chosen(inputs @ router.T + bias)[:, owner]
            total += float(np.square(on @ down.T - inner @ self._down.T).sum(dtype=np.float64))
        return total

    def _measured(self, groups: Groups, owner: Neurons, router: F32, bias: F32, down: F32) -> _Measured:
        outputs = np.empty_like(self._hidden)
        logits = 0.0
        for rows, inputs, inner in self._chunks(slice(0, len(self._hidden))):
            scores = inputs @ router.T
            outputs[rows] = (inner * self._chosen(scores + bias)[:, owner]) @ down.T
            logits += float(np.square(scores).sum(dtype=np.float64))
        whole = routed = kept = best = 0.0
        for _, inputs, inner in self._chunks(self._held_out):
            sizes = self._expert_sizes(inner, groups)
            chosen = self._chosen(inputs @ router.T + bias)
            whole += float(np.square(inner @ self._down.T).sum(dtype=np.float64))
            routed += float(sizes.sum(dtype=np.float64))
            kept += float(sizes[chosen[:, :-1]].sum(dtype=np.float64))
            best += float(sizes[self._chosen(sizes)[:, :-1]].sum(dtype=np.float64))
        logit = (logits / (len(self._hidden) * len(groups))) ** 0.5
        routed = max(routed, 1e-30)
        return _Measured(outputs, routed / max(whole, 1e-30), kept / routed, best / routed, logit)


class _Measured(NamedTuple):
    outputs: F32
    routed_size: float
    kept: float
    best: float
    logit: float  # root mean square of the router's scores without biases


def most_active(sizes: F32, count: int) -> Neurons:
    """Return the neurons that are most often among the quarter of the neurons that add most to a token."""
    quarter = max(1, sizes.shape[1] // 4)
    least = np.partition(sizes, -quarter, axis=1)[:, -quarter, None]
    rates = (sizes >= least).mean(axis=0) + 1e-6 * sizes.mean(axis=0) / max(float(sizes.mean()), 1e-30)
    return np.sort(np.argsort(-rates, kind="stable")[:count])


def balanced_clusters(points: F32, count: int) -> Groups:
    """Return the rows of `points` in clusters of equal size: k-means, in which the points that lose most if they do not
    get the nearest centre choose first. The same points give the same clusters."""
    capacity = len(points) // count
    centres = _first_centres(points, count)
    best: tuple[float, NDArray[np.intp]] | None = None
    for _ in range(_ROUNDS):
        distances = np.square(points).sum(axis=1)[:, None] - 2 * points @ centres.T + np.square(centres).sum(axis=1)
        labels = _assign(distances, capacity)
        cost = float(np.take_along_axis(distances, labels[:, None], axis=1).sum(dtype=np.float64))
        if best is not None and cost >= best[0]:
            break
        best = cost, labels
        centres = np.stack([points[labels == each].mean(axis=0) for each in range(count)])
    assert best is not None
    return np.argsort(best[1], kind="stable").reshape(count, capacity)


def _first_centres(points: F32, count: int) -> F32:
    """Return points that are far from each other, beginning with the one nearest to the mean."""
    chosen = [int(np.square(points - points.mean(axis=0)).sum(axis=1).argmin())]
    nearest = np.square(points - points[chosen[0]]).sum(axis=1)
    for _ in range(count - 1):
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, np.square(points - points[chosen[-1]]).sum(axis=1))
    return points[chosen]


def _assign(distances: F32, capacity: int) -> NDArray[np.intp]:
    order = np.argsort(distances, axis=1, kind="stable")
    by_rank = np.take_along_axis(distances, order, axis=1)
    regret = by_rank[:, 1] - by_rank[:, 0]
    room = [capacity] * distances.shape[1]
    labels = np.empty(len(distances), dtype=np.intp)
    for point in np.argsort(-regret, kind="stable"):
        label = next(int(each) for each in order[point] if room[each])
        room[label] -= 1
        labels[point] = label
    return labels
