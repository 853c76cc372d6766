"""Every type of the domain, in one place. Words used throughout, as in the field:

- *graph*: one evaluation of the compute graph, a prefill chunk or one decode step.
- *batch*: one (graph, layer); its experts are looked up together, residency is frozen at its start.
- *entry*: one (layer, expert) in the cache, all its projections together.
- *token cycle*: the bytes one token asks for, sum over MoE layers of k * entry bytes.
- *lane*: in the replayer, one cell of a sweep; in the engine, one reader thread.
- *residency*: 0 missing, 1 in RAM, 2 in RAM by speculation.

Policies are functions of one candidate or entry: the compiled loop gives them numbers, the scan arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

Array = Any
"""A number in the compiled loop, a NumPy or JAX array elsewhere."""

PREFILL, DECODE = 0, 1
NEVER = 2**62
"""Position and batch of a use that does not come."""
THROW_AWAY_TURN = -1
"""Turn number of the throw-away decode that warms the cache: replayed, never counted."""

Scope = Literal["global", "per_layer"]
Gating = Literal["softmax", "sigmoid", "logits"]
ScoreSpace = Literal["prob", "raw"]
Stage = Literal["width", "rerank", "swap", "drop"]

# -- the policy contract -------------------------------------------------------------------------------------


class Knob(NamedTuple):
    """One number a policy takes. It is data: every setting of a sweep has its own."""

    default: float
    low: float
    high: float
    integer: bool = False
    help: str = ""


class Learned(NamedTuple):
    """One thing a routing policy learns from a part of a trace before it runs."""

    per: Literal["layer", "expert", "pair"]
    """What `train` gives: `[B]`, `[B, E]` or `[B, E, E]` (an expert to be replaced, a candidate for it)."""
    untrained: float | None = None
    """The value everywhere in a run without training; None: such a run is refused."""
    help: str = ""


class LearnedValues(SimpleNamespace):
    """What a policy learned about a candidate, float32, by name; per pair, also about the slot's expert."""


class Candidate(NamedTuple):
    """What a routing policy may look at: an expert, or for a `drop` policy a slot. Fields not declared are zeros.

    In the compiled loop every field is one number; the scan gives arrays `[C, ...]` of all candidates at once.
    """

    value: Array
    """float32: the ranking value, ln p where the graph sorted probabilities; never NaN (needs "scores")."""
    expert: Array
    """int: expert id."""
    rank: Array
    """int: place in the router's own ranking, 0 is its first pick (needs "rank"); for slots, the slot."""
    resident: Array
    """bool: in RAM at the start of the batch."""
    weight: Array
    """float32: the weight the expert matmul would apply under the routing so far, 0 for experts outside it (needs
    "weights")."""
    mass: Array = 0.0
    """float32: the router's probability of all experts it ranks before this one, 0 for its first (needs "mass"; not
    for slots)."""
    lighter: Array = 0.0
    """float32, for slots alone: the weight of this slot and all lighter ones, of equal ones the later counts as
    lighter (needs "lighter")."""
    learned: Any = LearnedValues()
    """What `train` returned, by name (declared by `learns`)."""


class Row(NamedTuple):
    """One token at one MoE layer: what is known of the whole row."""

    k: Array
    """int: experts per token in force (after any `width` policy)."""
    layer: Array
    """int: index among the MoE layers."""
    top: Array
    """float32: largest finite ranking value of the row (0 if none is finite)."""
    range: Array
    """float32: largest minus smallest finite ranking value, rounded once."""
    n_resident: Array
    """int: resident experts of this layer, with "scores" only those of a finite ranking value."""
    heaviest: Array = 0.0
    """float32, for a `drop` policy alone: the largest weight of the row's slots (needs "weights")."""


class Rerank(NamedTuple):
    """What a `rerank` policy makes of a candidate: the k of largest (tier, value) run, ties to the lower expert id."""

    value: Array
    """Taken as float32; NaN is refused, and +inf where the candidate's own value is not."""
    tier: Array
    """A whole number."""
    active: Array
    """bool, alike for all candidates of a row: False leaves the row to the router and does not count it."""


class Swap(NamedTuple):
    """What a `swap` policy makes of a candidate.

    Slot by slot, a slot whose expert is to be replaced goes to the best remaining candidate: resident, outside the
    router's k, not taken by an earlier slot, of a finite ranking value.
    """

    replace: Array
    """bool: as the router's expert, it is to be replaced."""
    value: Array
    """Its worth as a replacement, taken as float32; -inf never takes a slot, NaN is refused."""
    active: Array
    """bool, alike for all candidates of a row."""


class Access(NamedTuple):
    """One entry touched by one row of a batch, given to an eviction policy's `touch`."""

    position: Array
    """int64: place of the entry's last occurrence in the walk over the whole run; unique per access."""
    first: Array
    """bool: first sight of the entry in this batch (a lookup)."""
    hit: Array
    """bool: that lookup found it in RAM."""
    weight: Array
    """float32: applied weights of this row's slots that run the entry, added up."""
    batch: Array
    """int64: number of the batch since the start of the run."""
    layer: Array
    """int: MoE layer index."""
    expert: Array
    """int: expert id."""
    next_position: Array = NEVER
    """int64: position of the entry's first occurrence after this batch, `NEVER` if none (needs "future")."""
    next_batch: Array = NEVER
    """int64: number of the batch of that occurrence (needs "future")."""


class Entry(NamedTuple):
    """One entry in RAM at a batch's end, given to an eviction policy's key."""

    position: Array
    """int64: place of its last occurrence in the walk; below zero if it was read ahead and not used yet."""
    layer: Array
    """int: MoE layer index."""
    expert: Array
    """int: expert id."""
    in_pass: Array
    """bool: looked up since the current pass over the layers began (needs "pass")."""
    speculative: Array
    """bool: read ahead and not looked up yet (needs "pass")."""
    batch: Array
    """int64: number of the batch that ends."""


RoutingFunction = Callable[..., Any]
"""`rerank`, `swap`: `(candidate, row, state, knobs) -> Rerank | Swap`; `drop`: the same `-> bool`;
`width`: `(k, knobs) -> int`. Pure, of one candidate."""

UpdateFunction = Callable[[Row, tuple[Array, ...], Any], tuple[Array, ...]]
"""`(row, state, knobs) -> state` of a layer, once per row of a decode graph, before its candidates are asked about."""

TouchFunction = Callable[[tuple[Array, ...], Access, Any], tuple[Array, ...]]
"""`(state, access, knobs) -> state` of the entry that one row touched."""

TrainFunction = Callable[[Any], Mapping[str, Array]]
"""`(training) -> arrays` by name, from a `simlab.replay.training.Training`; runs once, with NumPy."""

KeyFunction = Callable[[Entry, tuple[Array, ...], Any], Array]
"""`(entry, state, knobs) -> key`, a number that float64 holds exactly: the smallest key is evicted first."""

QueueFunction = Callable[[Any, Any], None]
"""`(cache, knobs) -> None` at every batch's end, compiled by numba: see `simlab.queues`."""

PrepareFunction = Callable[[Array, Array, int, SimpleNamespace], dict[str, Array]]
"""`(counts, sizes, capacity, knobs) -> state` of one cache before a run that trains, with NumPy. int64 `[n]` each:
batches of the training part that picked the entry, and its bytes; `capacity` in bytes."""

Kind = Literal["static", "dynamic", "queue"]
"""By what an eviction's order depends on: keys that change only with use; keys that change by themselves; links."""


@dataclass(frozen=True)
class RoutingPolicy:
    """A routing policy: which experts run. Made by the decorators of `simlab.policy`."""

    name: str
    """The function's name; `name@my_policy.py` for one that is not built in, so that nobody takes it for one."""
    stage: Stage
    function: RoutingFunction
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    """Inputs it needs of a trace: "scores", "rank", "weights", "mass", "lighter"."""
    state: Mapping[str, float] = field(default_factory=dict)
    """Names and first values (float32) of its per-layer state."""
    update: UpdateFunction | None = None
    """What changes `state`."""
    learns: Mapping[str, Learned] = field(default_factory=dict)
    train: TrainFunction | None = None
    """What fills `learns`."""
    uses_cache: bool = True
    """Whether it looks at residency; if not, it is shown none and runs without a cache too."""
    ordered: bool = False
    """Whether of two candidates outside the router's picks and alike in residency the higher-scored is never behind."""
    source: str = ""
    source_hash: str = ""
    version: int = 1
    """Of its rule: raised when the same inputs come to other picks."""
    origin: str = ""
    """File a user's policy is from; empty for what is built in."""

    def is_builtin(self, name: str) -> bool:
        """Whether this is the built-in policy of that name, and not a user's that is called the same."""
        module = getattr(self.function, "__module__", None) or ""
        return self.name == name and module.startswith("simlab.policies.")


@dataclass(frozen=True)
class EvictionPolicy:
    """An eviction policy: what stays. A key per entry (static or dynamic), or a function over queues.

    With a key the victim is the entry of the smallest key, then least recent, then lower (layer, expert).
    """

    name: str
    kind: Kind
    function: Callable[..., Any]
    """A `KeyFunction`, or a `QueueFunction`."""
    touch: TouchFunction | None = None
    state: Mapping[str, float] = field(default_factory=dict)
    """Names and first values of its per-entry state (whole numbers if the value is an int)."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """The same of the state that a whole cache has once; of queue policies."""
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    """"pass": `Entry` says `in_pass` and `speculative`. "future": `touch` is given next uses. "training": `prepare`
    runs on a training part."""
    bypass: bool = False
    """Whether the batch's own entries may leave at its end too; without it they never do."""
    scope: Scope | None = None
    """The only scope it has; None leaves it to the setting."""
    prepare: PrepareFunction | None = None
    source: str = ""
    source_hash: str = ""
    version: int = 1
    """Of its rule: raised when the same inputs come to other victims."""
    origin: str = ""
    """File a user's policy is from; empty for what is built in."""


Policy = RoutingPolicy | EvictionPolicy

# -- a cell: one setting of everything -----------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One routing policy of a route with its knobs filled in."""

    policy: RoutingPolicy
    knobs: Mapping[str, float]
    option: str = field(default="", compare=False)
    """What the user wrote to get it, such as `--top-k 4`, for messages."""

    @property
    def is_exact(self) -> bool:
        """Whether it leaves the router's own routing as it is: `original`, or a margin or drop of zero."""
        of = {"substitute": "L", "drop_cold": "F"}
        return self.policy.is_builtin("original") or any(
            self.policy.is_builtin(name) and self.knobs[knob] == 0 for name, knob in of.items()
        )


@dataclass(frozen=True)
class Route:
    """Routing policies composed in stage order: at most one each of width, rerank or swap, and drop.

    Empty: the router's own.
    """

    steps: tuple[Step, ...] = ()
    router_known: bool = field(default=True, compare=False)
    """False in what was replayed from a trace that holds what ran and not what the router picked."""

    def step(self, stage: Stage) -> Step | None:
        """The step of one stage, or None."""
        return next((s for s in self.steps if s.policy.stage == stage), None)

    @property
    def reroute(self) -> Step | None:
        """The step that decides which experts run, a `rerank` or a `swap`, or None."""
        return self.step("rerank") or self.step("swap")

    @property
    def name(self) -> str:
        return "+".join(s.policy.name for s in self.steps) or "original"

    @property
    def known_name(self) -> str | None:
        """The name, None where nobody knows what the routing was."""
        return self.name if self.router_known or self.name != "original" else None

    @property
    def knobs(self) -> dict[str, float]:
        """Knobs of all steps; a name used by two steps is prefixed with its policy."""
        flat: dict[str, float] = {}
        for s in self.steps:
            for name, value in s.knobs.items():
                flat[f"{s.policy.name}.{name}" if name in flat else name] = value
        return flat

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(s.policy.needs for s in self.steps)) if self.steps else frozenset()


@dataclass(frozen=True)
class Budget:
    """A cache size as the user wrote it; `simlab.cells.resolve_budget` turns it into bytes for a model."""

    kind: Literal["bytes", "cycles", "per_layer", "fraction", "off"]
    amount: float
    text: str


@dataclass(frozen=True)
class ResolvedBudget:
    """A budget in bytes for one model: `layer_bytes[i]` bounds MoE layer i when `per_layer`, else the total does."""

    total_bytes: int
    layer_bytes: tuple[int, ...]
    per_layer: bool
    off: bool = False


@dataclass(frozen=True)
class Cell:
    """One setting: routing, eviction, budget and scope."""

    route: Route
    budget: Budget
    evict: str = "lru"
    evict_knobs: Mapping[str, float] = field(default_factory=dict)
    scope: Scope = "global"
    sequential: bool = False
    """Whether slots are looked up, inserted and evicted one by one: replay only, to measure what that does."""
    prefetch: str | None = None
    """What a replay reads ahead, as `--prefetch` names it; None: what the recording did."""

    @property
    def evict_spec(self) -> str:
        """The eviction policy with its knobs, as `--evict` takes it."""
        knobs = ",".join(f"{name}={value:g}" for name, value in self.evict_knobs.items())
        return self.evict + (f":{knobs}" if knobs else "")

    @property
    def margin(self) -> float | None:
        """L of the built-in `substitute`, None without it."""
        return next((s.knobs["L"] for s in self.route.steps if s.policy.is_builtin("substitute")), None)

    @property
    def drop(self) -> float | None:
        """F of the built-in `drop_cold`, None without it."""
        return next((s.knobs["F"] for s in self.route.steps if s.policy.is_builtin("drop_cold")), None)


# -- a trace's header ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provenance:
    """What a run, or a figure, is of. `simlab.trace.provenance` makes one and compares two; None: not known."""

    model: str | None = None
    """Digest of the GGUF: metadata, tensor table and a sample of every tensor's bytes."""
    text: str | None = None
    """Digest of the token ids of the text or prompts; of an import, of the files it was made from."""
    policy: str | None = None
    """Policies with all knobs, in words: a built-in one with the version of its rule, a user's with its file's hash."""
    budget: str | None = None
    """Bytes of the cache, in words."""
    recorded: str | None = None
    """Of a setting replayed from a trace, or run live beside one: policy and budget of that trace's own run."""
    simlab: str | None = None
    """Version that made it: shown, never compared."""


def known_fields(provenance: Provenance) -> dict[str, str]:
    """What is known of a provenance, by name, as JSON has it."""
    return {name: value for name, value in vars(provenance).items() if value is not None}


@dataclass(frozen=True)
class WeightRule:
    """How the graph turns gate probabilities of the selected experts into applied weights, in this order."""

    softmax_over_selected: bool = False
    normalise: bool = True
    clamp_min: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class TraceHeader:
    """`header.json` of a trace. Layer keys are model layer numbers; only MoE layers are listed. Sizes in bytes."""

    model: str
    arch: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    gating: Gating | None
    score_space: ScoreSpace | None
    weight_rule: WeightRule | None
    entry_bytes: Mapping[int, int]
    selection_bias: bool = False
    """Whether the scores hold a selection bias: without gate_probs beside them no probability is known."""
    router_known: bool = True
    """False where `router_experts` are what ran, and nobody says what the router picked."""
    window_bytes: Mapping[int, tuple[int, ...]] | None = None
    dense_bytes: Mapping[int, int] | None = None
    budget_bytes: int | None = None
    """Cache size it was recorded at; 0 with the cache off, null when unknown."""
    budget: str | None = None
    """The same as `--budget` takes it, kind and all: `12/layer` is another cache than its bytes."""
    prefetch: str | None = None
    """Look-ahead it was recorded with; its entries are in the reads table, at the batch they were resident from."""
    route: str | None = None
    knobs: Mapping[str, float] = field(default_factory=dict)
    evict: str | None = None
    scope: Scope | None = None
    policy_source_hash: str | None = None
    io_mode: Literal["direct", "buffered"] | None = None
    engine: str | None = None
    engine_version: str | None = None
    cpu: str | None = None
    text_hash: str | None = None
    """SHA-256 of the text's bytes, which engines that take a file are checked by."""
    created: str | None = None
    provenance: Provenance | None = None
    """None in a trace of a version that did not write it."""
    schema_version: int = 1
    complete: bool = True
    """False while a recording runs, so that a killed one is recognised."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Model layer numbers of the MoE layers, ascending."""
        return tuple(sorted(self.entry_bytes))

    def cycle_bytes(self, k: int | None = None) -> int:
        """One token cycle: sum over MoE layers of k * entry bytes."""
        return (k or self.n_expert_used) * sum(self.entry_bytes.values())

    @property
    def expert_bytes(self) -> int:
        """All experts of all MoE layers."""
        return self.n_expert * sum(self.entry_bytes.values())


# -- a cell's numbers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseNumbers:
    """The counters of one phase of one cell; the names are those of the JSON contract."""

    tokens: int
    lookups: int
    hits: int
    misses: int
    hit_rate: float | None
    cold_misses: int
    capacity_misses: int
    read_mib: float
    read_mib_per_token: float | None
    slots: int
    reranked: int
    substituted: int | None
    """Null, as the agreement, where the router's own picks are not in the trace."""
    dropped: int
    evictions: int
    rereads: int
    mass_displaced: float | None
    score_regret: float | None
    agreement: float | None


@dataclass(frozen=True)
class CellNumbers:
    """What a replay or a live run of one cell gives. Live runs fill the timing and quality fields."""

    source: Literal["replay", "live"]
    cell: Cell
    budget_mib: float
    budget_cycles: float
    top_k: int
    decode: PhaseNumbers
    all: PhaseNumbers
    tok_s: float | None = None
    wall_ms_per_token: float | None = None
    read_wait_ms_per_token: float | None = None
    ppl: float | None = None
    nll: float | None = None
    ppl_ratio: float | None = None
    """Perplexity over that of the first cell it was run beside, token by token."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95 % (low, high), block bootstraps over the decoded tokens: of the fields above by their names, of decode means
    (those of `simlab.judge.against.intervals_of`), and of `read_mib_saved` beside the router's own routing."""
    read_ahead: Mapping[str, float] | None = None
    """Of look-ahead in decode: entries `issued` and `useful` (used before they left), `read_mib` and `wasted_mib`."""
    note: str | None = None
    """What a reader has to know to take these numbers for what they are."""
    provenance: Provenance | None = None


@dataclass(frozen=True)
class Comparison:
    """One cell replayed from a trace and run live on the same token ids."""

    replay: CellNumbers
    live: CellNumbers
