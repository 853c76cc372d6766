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
    sequential: bool = False
    """Whether every slot is a batch of its own to the cache."""
    executed: bool = False
    """Whether rows carry each lane's routing, of a first pass, which then stands."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for shapes that compile to the same program."""
        sizes = (self.n_layers, self.n_expert, self.n_slots, self.n_expert_used, self.n_speculative)
        code = code_key(self.steps, self.eviction)
        modes = (self.detail, self.sequential, self.executed)
        return (code, sizes, self.scores, self.weights, self.weight_rule, modes)

    def step(self, stage: Stage) -> Step | None:
        return next((s for s in self.steps if s.policy.stage == stage), None)


def code_key(steps: tuple[Step, ...], eviction: EvictionPolicy) -> tuple[Any, ...]:
    """Equal where the policies' code is the same: the functions themselves, whatever they are called."""

    def declared(p: RoutingPolicy | EvictionPolicy) -> tuple[Any, ...]:
        # repr, because 0 and 0.0 are equal and start arrays of different dtypes.
        once = p.scalars if isinstance(p, EvictionPolicy) else {}
        firsts = repr((sorted(p.state.items()), sorted(once.items())))
        return tuple((n, k.integer) for n, k in p.knobs.items()), firsts

    routing = tuple(
        (p.stage, p.function, p.needs, p.uses_cache, p.train, tuple(p.learns.items()), declared(p))
        for p in (s.policy for s in steps)
    )
    rules = (eviction.needs, eviction.bypass, eviction.scope, eviction.prepare)
    return (routing, eviction.function, eviction.touch, rules, declared(eviction))
