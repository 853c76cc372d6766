"""What arrays and tables do not say of their model: a JSON file beside them, or the options of `simlab import`.

The fields are those of `header.json` where it has them, so a sidecar reads like one:

    {"model": "...", "n_expert": 128, "expert_bytes": 2654208, "moe_layers": "1-47", "gating": "softmax",
     "score_space": "prob", "weight_rule": {"normalise": true}, "prefill": [28], "columns": {"ids": "topk"}}

An option beats the sidecar's field of the same name. Nothing has a default that would change a figure: what a
run of the policies needs and nobody says is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from simlab.cells import parse_route
from simlab.errors import InputError
from simlab.trace.csv_text import EXACT, INT32, MAX_ENTRY_BYTES, MAX_EXPERT, MAX_LAYER
from simlab.trace.json_text import read_json
from simlab.trace.reading import shown
from simlab.types import Gating, Route, ScoreSpace, WeightRule

FIELDS = (
    "model", "arch", "n_layer", "n_expert", "n_expert_used", "moe_layers", "expert_bytes", "dense_bytes", "gating",
    "score_space", "weight_rule", "prefill", "turns", "skip_tokens", "skip_padding", "columns", "engine",
    "engine_version", "cpu", "axes", "selection_bias", "route",
)  # fmt: skip
TOKENS_FIRST, LAYERS_FIRST = "tokens,layers,k", "layers,tokens,k"
_OTHER_NAMES = {"entry_bytes": "expert_bytes"}
_RANGES = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")
_MAX_TURNS = 1 << 20


class _Wrong(Exception):
    """What is wrong with a field."""


@dataclass(frozen=True)
class Facts:
    """Checked facts; None where nobody said. Layer numbers are the model's, sizes bytes, lengths tokens."""

    model: str = ""
    arch: str = ""
    n_layer: int | None = None
    n_expert: int | None = None
    n_expert_used: int | None = None
    moe_layers: tuple[int, ...] | None = None
    expert_bytes: int | tuple[int, ...] | dict[int, int] | None = None
    """Of one entry: one number for every layer, one per MoE layer in order, or by layer number."""
    dense_bytes: int | tuple[int, ...] | dict[int, int] | None = None
    gating: Gating | None = None
    score_space: ScoreSpace | None = None
    weight_rule: WeightRule | None = None
    prefill: tuple[int, ...] | None = None
    """Tokens of each turn's prompt, evaluated in one graph."""
    turns: tuple[int, ...] | None = None
    """Tokens of each turn, prompt included."""
    skip_tokens: int | None = None
    skip_padding: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of an array or column to the file's."""
    engine: str | None = None
    engine_version: str | None = None
    cpu: str | None = None
    axes: str | None = None
    """What the axes of the arrays are, `tokens,layers,k` or `layers,tokens,k`."""
    selection_bias: bool = False
    """Whether the scores hold a selection bias."""
    route: Route | None = None
    """What the recorded run ran under."""
    said: Mapping[str, str] = field(default_factory=dict)
    """Where each field that was given stands, for messages."""

    def refuse(self, name: str, problem: str) -> InputError:
        """The error for one fact, given or not."""
        return InputError(f"{self.said.get(name, _option(name))}: {problem}")

    def sizes(self, name: str, layers: Sequence[int], path: Path) -> dict[int, int] | None:
        """`expert_bytes` or `dense_bytes` by layer number, None where nobody said.

        Raises:
            InputError: a layer without a size, or another number of sizes than of layers.
        """
        given = getattr(self, name)
        if given is None or isinstance(given, int):
            return None if given is None else dict.fromkeys(layers, given)
        if isinstance(given, tuple):
            if len(given) != len(layers):
                raise self.refuse(name, f"{len(given)} sizes, but {path} has {len(layers)} MoE layers")
            return dict(zip(layers, given, strict=True))
        for layer in layers:
            if layer not in given:
                raise self.refuse(name, f"has no layer {layer}, where {path} routes experts")
        return {layer: given[layer] for layer in layers}


def keeps_router(route: Route) -> bool:
    """Whether the experts that run under a route, before any drop, are the router's own."""
    step = route.reroute
    if step is None or step.policy.is_builtin("original"):
        return True
    return step.policy.is_builtin("substitute") and step.knobs["L"] == 0


def read_facts(sidecar: Path | None, options: Mapping[str, Any]) -> Facts:
    """The facts of a sidecar file, None for none, and of options by field name; an option of None is not given.

    Raises:
        InputError: a field nobody knows, or a value that cannot be used.
    """
    checked: dict[str, Any] = {}
    said: dict[str, str] = {}
    if sidecar is not None:
        fields = read_json(sidecar)
        if not isinstance(fields, dict):
            raise InputError(f"{sidecar}: not a JSON object of model facts")
        for name, value in fields.items():
            known = _OTHER_NAMES.get(name, name)
            if known not in FIELDS:
                raise InputError(f"{sidecar}: field {shown(name)} is unknown; there are {', '.join(FIELDS)}")
            if known == "route":
                raise InputError(f"{sidecar}: field 'route': no file says what code to run; give --route")
            if known in checked:
                raise InputError(f"{sidecar}: field '{name}': the same as '{known}', which is there too")
            if value is not None:
                said[known] = f"{sidecar}, field '{name}'"
                checked[known] = _checked(known, value, said[known])
    for name, value in options.items():
        if name not in FIELDS:
            raise InputError(f"facts: field {shown(name)} is unknown; there are {', '.join(FIELDS)}")
        if value is not None:
            said[name] = _option(name)
            checked[name] = _checked(name, value, said[name])
    facts = Facts(**checked, said=said)
    _check_together(facts)
    return facts


def _checked(name: str, value: Any, where: str) -> Any:
    try:
        return _CHECKS[name](value)
    except _Wrong as error:
        raise InputError(f"{where}: {error}") from error


def parse_words(option: str, text: str) -> dict[str, Any]:
    """`name=value,name=value` of an option, the values as text.

    Raises:
        InputError: a part without `=`, or a name given twice.
    """
    out: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not (name and equals and value):
            raise InputError(f"{option}: '{part}' is not name=value")
        if name in out:
            raise InputError(f"{option}: '{name}' is there twice")
        out[name] = value
    return out


def parse_rule(text: str) -> dict[str, Any]:
    """A weight rule as `--weight-rule` takes it: `normalise=1,scale=2.5`."""
    out: dict[str, Any] = {}
    for name, word in parse_words("--weight-rule", text).items():
        if name in ("softmax_over_selected", "normalise"):
            known = {"1": True, "true": True, "0": False, "false": False}
            if word.lower() not in known:
                raise InputError(f"--weight-rule: {name} is '{word}', must be 0 or 1")
            out[name] = known[word.lower()]
        else:
            try:
                out[name] = float(word)
            except ValueError:
                raise InputError(f"--weight-rule: {name} is '{word}', must be a number") from None
    return out


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ---------------------------------------------------------------------------------------------------------
# One check per field


def _text(value: Any) -> str:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _Wrong(f"{shown(value)}, must be a text")
    return value


def _route(value: Any) -> Route:
    return value if isinstance(value, Route) else parse_route(_text(value))


def _axes(value: Any) -> str:
    words = value.replace(" ", "") if isinstance(value, str) else value
    return _one_of(TOKENS_FIRST, LAYERS_FIRST)(words)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"{shown(value)}, must be true or false")
    return value


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _Wrong(f"{shown(value)}, must be a whole number from {low} to {high}")
        return value

    return check


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise _Wrong(f"{shown(value)}, must be one of {', '.join(words)}")
        return value

    return check


def _sizes(low: int) -> Callable[[Any], Any]:
    one = _whole(low, MAX_ENTRY_BYTES)

    def check(value: Any) -> Any:
        if isinstance(value, list):
            if not value or len(value) > MAX_LAYER + 1:
                raise _Wrong("must be one size, or a list of one size per MoE layer")
            return tuple(one(item) for item in value)
        if isinstance(value, dict):
            return {_layer(name): one(item) for name, item in value.items()}
        return one(value)

    return check


def _layer(name: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,5}", name) or int(name) > MAX_LAYER:
        raise _Wrong(f"{shown(name)} is not a layer number")
    return int(name)


def _lengths(value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    if not items or len(items) > _MAX_TURNS:
        raise _Wrong("must be one length, or a list of one per turn")
    return tuple(map(_whole(0, INT32), items))


def _layers(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        if not _RANGES.fullmatch(value):
            raise _Wrong(f"{shown(value)}, must be layer numbers such as 1-47 or 3,7,11")
        found: list[int] = []
        for part in value.split(","):
            first, _, last = part.partition("-")
            if int(last or first) > MAX_LAYER:
                raise _Wrong(f"{last or first}, must be from 0 to {MAX_LAYER}")
            found += range(int(first), int(last or first) + 1)
    elif isinstance(value, list):
        found = list(map(_whole(0, MAX_LAYER), value))
    else:
        raise _Wrong(f"{shown(value)}, must be a list of layer numbers, or a text such as 1-47")
    if not found or any(b <= a for a, b in pairwise(found)):
        raise _Wrong(f"{shown(value)}, must be layer numbers that go up")
    return tuple(found)


def _rule(value: Any) -> WeightRule:
    if not isinstance(value, dict):
        raise _Wrong(f"{shown(value)}, must be an object")
    limits = {"clamp_min": (0.0, 1.0), "scale": (1e-6, 1e6)}
    parts: dict[str, Any] = {}
    for name, item in value.items():
        if name in ("softmax_over_selected", "normalise"):
            parts[name] = _flag(item)
        elif name in limits:
            low, high = limits[name]
            if isinstance(item, bool) or not isinstance(item, (int, float)) or not low <= item <= high:
                raise _Wrong(f"{name} is {shown(item)}, must be a number from {low:g} to {high:g}")
            parts[name] = float(item)
        else:
            raise _Wrong(
                f"{shown(name)} is unknown; there are softmax_over_selected, normalise, clamp_min, scale"
            )
    return WeightRule(**parts)


def _columns(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _Wrong(f"{shown(value)}, must be an object of our names to the file's")
    return {name: _text(item) for name, item in value.items()}


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "model": _text, "arch": _text, "engine": _text, "engine_version": _text, "cpu": _text,
    "n_layer": _whole(1, MAX_LAYER + 1), "n_expert": _whole(1, MAX_EXPERT), "n_expert_used": _whole(1, MAX_EXPERT),
    "moe_layers": _layers, "expert_bytes": _sizes(1), "dense_bytes": _sizes(0),
    "gating": _one_of("softmax", "sigmoid", "logits"), "score_space": _one_of("prob", "raw"), "weight_rule": _rule,
    "prefill": _lengths, "turns": _lengths, "skip_tokens": _whole(0, EXACT), "skip_padding": _flag,
    "columns": _columns, "axes": _axes, "selection_bias": _flag, "route": _route,
}  # fmt: skip


def _check_together(facts: Facts) -> None:
    if facts.n_expert is not None and (facts.n_expert_used or 0) > facts.n_expert:
        raise facts.refuse("n_expert_used", f"{facts.n_expert_used} of {facts.n_expert} experts")
    if facts.n_layer is not None and facts.moe_layers and facts.moe_layers[-1] >= facts.n_layer:
        raise facts.refuse("moe_layers", f"layer {facts.moe_layers[-1]} of a model of {facts.n_layer} layers")
    legal = {("softmax", "prob"), ("softmax", "raw"), ("sigmoid", "raw"), ("logits", "raw")}
    pair = (facts.gating, facts.score_space)
    if None not in pair and cast(tuple[str, str], pair) not in legal:
        raise facts.refuse(
            "score_space",
            f"prob, but a {facts.gating} router ranks by its scores as they are: score_space is raw",
        )
    if facts.selection_bias and facts.score_space == "prob":
        raise facts.refuse("selection_bias", "biased scores are no probabilities: score_space is raw")
    if (
        facts.weight_rule is not None
        and facts.weight_rule.softmax_over_selected
        and facts.score_space == "prob"
    ):
        raise facts.refuse(
            "weight_rule", "softmax_over_selected takes raw logits, but the scores are probabilities"
        )
