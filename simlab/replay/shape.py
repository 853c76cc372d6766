"""What is compiled into a replay program, apart from what is data along its lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simlab.replay.columns import WeightSource
from simlab.types import EvictionPolicy, RoutingPolicy, Stage, Step, WeightRule


@dataclass(frozen=True, eq=False)
class ProgramShape:
    """All that is compiled in: policy code, sizes, which inputs a trace gives. Everything else is data."""

    steps: tuple[Step, ...]
    """One step per stage; their knobs are ignored."""
    eviction: EvictionPolicy
    n_layers: int
    n_expert: int
    n_slots: int
    n_expert_used: int
    """The router's own k, against which mass, regret and agreement are taken."""
    scores: bool
    weights: WeightSource | None
    """Where weights come from: "scores", "recorded", or None where nothing wants them."""
    weight_rule: WeightRule | None
    detail: bool
    """Whether each row's slots and counters come out as well."""
    n_speculative: int = 0
    """Most entries that look-ahead brings in before one batch."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for shapes that compile to the same program."""
        sizes = (self.n_layers, self.n_expert, self.n_slots, self.n_expert_used, self.n_speculative)
        code = code_key(self.steps, self.eviction)
        return (code, sizes, self.scores, self.weights, self.weight_rule, self.detail)

    def step(self, stage: Stage) -> Step | None:
        return next((s for s in self.steps if s.policy.stage == stage), None)


def code_key(steps: tuple[Step, ...], eviction: EvictionPolicy) -> tuple[Any, ...]:
    """Equal where the policies' code is the same: the functions themselves, whatever they are called."""

    def declared(p: RoutingPolicy | EvictionPolicy) -> tuple[Any, ...]:
        # repr, because 0 and 0.0 are equal and start arrays of different dtypes.
        return tuple((n, k.integer) for n, k in p.knobs.items()), repr(sorted(p.state.items()))

    routing = tuple((s.policy.stage, s.policy.function, s.policy.needs, declared(s.policy)) for s in steps)
    return (routing, eviction.key, eviction.touch, declared(eviction))
