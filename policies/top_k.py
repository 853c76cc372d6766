"""Turbo top-k: run only the k' best experts of each token, whatever the model was trained with.

It comes before every other rule and is the k of all of them; live, it is llama.cpp's `expert_used_count`
override. A k' above the recorded one needs the scores.
"""

from simlab.policy import routing
from simlab.types import Knob


@routing(
    "width", knobs={"k": Knob(8, 1, 512, integer=True, help="experts per token")}, source="policies.md: top_k"
)
def top_k(k, knobs):
    """k' experts per token."""
    return knobs.k
