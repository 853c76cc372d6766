"""Buddies: a missing expert is replaced by the resident expert that is most often picked along with it.

How often the router picks two experts for the same token is counted over a training part of the trace
(`--train`). An expert's buddies are the `n` experts most often picked with it, ties to the lower id. Slot by
slot, a missing expert's slot goes to its first buddy that is resident, outside the router's picks and not
taken by an earlier slot; if there is none, the expert is read.

Inputs: none of the scores, so that it replays imported traces too; a training part. Source: BuddyMoE,
arXiv:2511.10054.

Uncertain: the paper also decides by token and layer whether to replace at all, and limits how many slots of a
token are; here every missing expert is replaced, its weight does not matter, and `n` alone bounds the
likeness. An expert never picked together with the missing one can be among its `n` if too few others were.
"""

import numpy as np

from simlab.policy import routing
from simlab.types import Knob, Learned, Swap
from simlab.xp import MINUS_INFINITY, where


def buddies(training):
    """Per layer and pair, the candidate's place among an expert's buddies: 0 is the most co-activated."""
    together = training.coactivation.copy()
    own = np.arange(together.shape[1])
    together[:, own, own] = -1
    order = np.argsort(-together, axis=2, kind="stable")
    return {"place": np.argsort(order, axis=2)}


@routing(
    "swap",
    knobs={"n": Knob(8, 0, 512, integer=True, help="buddies of an expert that may stand in for it")},
    learns={"place": Learned("pair", help="place of one expert among the buddies of another")},
    train=buddies,
    source="BuddyMoE, arXiv:2511.10054; policies.md: buddy",
)
def buddy(candidate, row, state, knobs):
    """Replace every missing expert, first buddy first."""
    place = candidate.learned.place
    value = where(place < knobs.n, -place, MINUS_INFINITY)
    return Swap(~candidate.resident, value, knobs.n > 0)
