"""Adaptive k: as many experts as it takes, by the weight that would be lost.

A token's slots are dropped from the lightest on, while the weight lost so far, times the layer's sensitivity,
stays below `t`; the heaviest slot always runs. Residency plays no part, so it also runs without a cache.
Survivors are scaled back to the full weight unless `renorm` is 0.

Inputs: weights, sums of the lighter ones; a training part if there is one. Source: AdapMoE, arXiv:2408.10284.

Uncertain: the paper measures each layer's sensitivity by Fisher information, which takes gradients of the
model on calibration text and is in no trace. The knob `sensitivity` therefore holds for all layers. With
`--train` it is multiplied by a stand-in of our own: the layer's mean router entropy over the training part,
divided by the mean of all layers. The reasoning: where the router is undecided, its weights say least about
which expert can be missed. Nobody has shown that the two go together; without `--train` every layer counts 1.
"""

import numpy as np

from simlab.policy import routing
from simlab.types import Knob, Learned


def sensitivities(training):
    """Per layer, mean entropy of the router's probability over that of all layers; 1 for a layer never seen."""
    mass, n_layers = training.mass, len(training.columns.trace.header.moe_layers)
    entropy = -(mass * np.log(np.where(mass > 0, mass, 1))).sum(axis=1)
    rows = np.bincount(training.layer, minlength=n_layers)
    mean = np.bincount(training.layer, weights=entropy, minlength=n_layers) / np.maximum(rows, 1)
    overall = mean[rows > 0].mean()
    return {"sensitivity": np.where((rows > 0) & (overall > 0), mean / max(overall, 1e-300), 1)}


@routing(
    "drop",
    knobs={
        "t": Knob(0.1, 0.0, 10.0, help="weight that may be lost, times the sensitivity"),
        "sensitivity": Knob(1.0, 0.0, 1000.0, help="of every layer; --train adds what tells layers apart"),
        "renorm": Knob(1, 0, 1, integer=True, help="1 scales the surviving weights back to their old total"),
    },
    needs={"weights", "lighter"},
    learns={
        "sensitivity": Learned("layer", untrained=1.0, help="stand-in for the layer's Fisher information")
    },
    train=sensitivities,
    uses_cache=False,
    source="AdapMoE, arXiv:2408.10284; policies.md: adaptive_k",
)
def adaptive_k(candidate, row, state, knobs):
    """Drop a slot if it and all lighter ones together weigh less than t over the sensitivity, strictly."""
    lost = candidate.lighter * (knobs.sensitivity * candidate.learned.sensitivity)
    return lost < knobs.t
