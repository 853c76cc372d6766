"""What a model is like, measured on the engine: held-out loss, the load of its experts, its routers, the price of L."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simlab.cells import build_cells
from simlab.judge.scores.ppl import Text, score_table, score_texts
from simlab.judge.scores.scoring import Engines
from simlab.judge.stats import Interval, block_bootstrap_mean
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.hook import RoutingEvent
from simlab.record.llama import log_probability
from simlab.record.plan import wide_graphs
from simlab.record.reads import FinishedRead
from simlab.record.recorder import Recorder
from simlab.scores import router_mass
from simlab.types import Gating

HELD_OUT = EMBEDDED_MODEL.with_name("heldout.txt")
TEXTS = tuple(EMBEDDED_MODEL.with_name(f"text-{name}.txt") for name in "bcd")
MARGINS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.6, 1.0)
BUDGET = "2cycles"
_PARTS = 8


class LayerFigures(NamedTuple):
    """One layer's routing over a text."""

    layer: int
    busiest: float
    """Load of the busiest expert over the mean load."""
    unused: int
    """Experts that no token chose."""
    load_experts: float
    """exp of the entropy of the load: how many equally loaded experts would be as uneven."""
    router_entropy: float
    """Mean over tokens of the entropy of the router's shares of all experts, in nats."""
    top_k_mass: float
    """Mean over tokens of the share of the k chosen."""


class HeldOut(NamedTuple):
    """A model on a text it has not seen, one graph per window, nothing lossy."""

    nll: float
    """Nats per token."""
    nll_interval: Interval
    by_part: list[float]
    """Over equal parts of the context window, of whole windows."""
    layers: list[LayerFigures]


class _Loads(Recorder):
    """Adds up who was chosen, and how decidedly."""

    def __init__(self, n_expert: int, gating: Gating) -> None:
        self.counts: dict[int, np.ndarray] = {}
        self.sums: dict[int, np.ndarray] = {}
        self._n_expert = n_expert
        self._gating: Gating = gating

    def on_batch(self, event: RoutingEvent) -> None:
        chosen = np.bincount(event.router_experts.ravel(), minlength=self._n_expert)
        shares = router_mass(event.scores, self._gating)
        entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum()
        mass = np.take_along_axis(shares, event.router_experts, axis=1).sum()
        self.counts[event.layer] = self.counts.get(event.layer, 0) + chosen
        self.sums[event.layer] = self.sums.get(event.layer, 0) + np.array([entropy, mass, len(shares)])

    def on_reads(self, reads: Sequence[FinishedRead], speculative: bool) -> None:
        pass

    def end_graph(self, *_: Any, **__: Any) -> None:
        pass

    def layers(self) -> list[LayerFigures]:
        found = []
        for layer, counts in sorted(self.counts.items()):
            load = counts / counts.sum()
            entropy, mass, n = self.sums[layer]
            spread = math.exp(-(load[load > 0] * np.log(load[load > 0])).sum())
            busiest = load.max() * len(load)
            found.append(
                LayerFigures(layer, busiest, int((counts == 0).sum()), spread, entropy / n, mass / n)
            )
        return found


def held_out(engine: Engine, text: bytes) -> HeldOut:
    """Score `text` in windows of the whole context; the engine's graphs must be as long."""
    engine.start(build_cells(budgets=["100%"], routes=["original"])[0])
    header = engine.header()
    assert header.gating is not None  # an engine knows its model's
    tokens, loads, losses = engine.tokenize(text), _Loads(header.n_expert, header.gating), []
    for plan in wide_graphs(len(tokens), engine.window):
        engine.forget_context()
        logits = engine.run_graph(plan, tokens[plan.start : plan.stop], None, loads).logits
        assert logits is not None
        following = tokens[plan.start + 1 : plan.stop + 1]
        losses.append(np.array([-log_probability(row, t) for row, t in zip(logits, following, strict=True)]))
    whole = np.mean([part for part in losses if len(part) == engine.window - 1] or losses[:1], axis=0)
    parts = [float(part.mean()) for part in np.array_split(whole, _PARTS)]
    return HeldOut(float(np.concatenate(losses).mean()), block_bootstrap_mean(losses), parts, loads.layers())


def report(model: Path, text: Path = HELD_OUT, texts: Sequence[Path] = TEXTS) -> str:
    """Everything the docs state of a model, as text."""
    with Engines(model, {}) as engines:
        engine = engines.get()
        engines.reopen(n_ubatch=engine.window)
        engine = engines.get()
        found = held_out(engine, text.read_bytes())
        engines.reopen(n_ubatch=512)
        cells = build_cells(budgets=[BUDGET], routes=[f"substitute:L={margin}" for margin in MARGINS])
        scored = [Text(path.name, engines.get().tokenize(path.read_bytes())) for path in texts]
        table = score_table([s for s in score_texts(engines, cells, scored) if s.text is None])
    low, high = found.nll_interval
    lines = [
        f"{model.name} on {text.name}: {found.nll:.4f} nats per byte [{low:.4f}, {high:.4f}], "
        f"{found.nll / math.log(2):.3f} bits",
        "by eighth of the context " + " ".join(f"{part:.3f}" for part in found.by_part),
        "",
        "layer  busiest / mean  unused  load, experts  router entropy, nats  top-k mass",
        *(
            f"{x.layer:5}  {x.busiest:14.2f}  {x.unused:6}  {x.load_experts:13.1f}  {x.router_entropy:20.2f}  "
            f"{x.top_k_mass:10.2f}"
            for x in found.layers
        ),
        "",
        f"{', '.join(path.name for path in texts)} at {BUDGET}, step by step:",
        table,
    ]
    return "\n".join(lines)
