"""The prediction module of a model's own checkpoint, as a variant loads it: its layer and the precision of its weights.

Reads no weights.
"""

from __future__ import annotations

import msgspec

from headrace.models.model_folder import ModelFolder
from headrace.models.packing import packed_size
from headrace.models.precision import WeightPlan
from headrace.models.prediction_module import open_prediction_module
from headrace.models.weight_choice import choose_plan
from headrace.variant import Variant


class OwnModule(msgspec.Struct, frozen=True):
    folder: ModelFolder  # a view of the model's, see `open_prediction_module`
    plan: WeightPlan

    @property
    def weight_bytes(self) -> int:
        return packed_size(self.folder.spec, self.folder.shapes, self.plan)


def own_module(folder: ModelFolder, variant: Variant) -> OwnModule | None:
    """Return the module that a variant drafts with, or None if it drafts in another way. Raise RequestError if the
    model has none."""
    if variant.speculation != "mtp":
        return None
    module = open_prediction_module(folder)
    if variant.draft_weights is not None:
        return OwnModule(module, choose_plan(module, variant.draft_weights))
    return OwnModule(module, choose_plan(module, variant.weights, group=variant.group))
