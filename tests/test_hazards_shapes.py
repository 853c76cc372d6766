"""What real traces and models contain: shapes, scores and weights. `test_hazards.py` has the table of the hazards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from dump_files import (
    FACTS,
    N_EXPERT,
    RUN,
    SCORED,
    arrays_with,
    csv_bytes,
    jsonl_bytes,
    list_rows,
    load,
    npy_bytes,
    npz_bytes,
    replayed,
    slot_rows,
    with_values,
)
from route_files import HEADING, route_lines, write_lines

from simlab.errors import InputError, SimlabWarning
from simlab.trace.importer import import_files
from simlab.trace.store import Trace, open_trace


def experts_of(trace: Trace) -> list[list[int]]:
    return trace.routing.collect()["experts"].to_list()


# -- shape ---------------------------------------------------------------------------------------------------


def test_k_overridden_at_run_time(tmp_path: Path) -> None:
    with pytest.warns(SimlabWarning, match="routings have 2 slots, --n-expert-used says 4; using 2"):
        trace = load(tmp_path, arrays_with(), **SCORED, n_expert_used=4)
    assert (trace.header.n_expert_used, trace.width) == (2, 2)


def test_k_differs_per_event(tmp_path: Path) -> None:
    rows = [row for row in slot_rows(RUN) if (row["token"], row["layer"], row["slot"]) != (4, 1, 1)]
    trace = load(tmp_path, ("run.csv", csv_bytes(rows)), **FACTS)
    assert trace.routing.filter(step=4, layer=1).collect()["experts"][0].to_list() == [
        RUN["ids"][4, 1, 0],
        -1,
    ]
    assert replayed(trace)[0].all.slots == 41


def test_zero_experts_for_a_token(tmp_path: Path) -> None:
    rows = list_rows(RUN)
    rows[14] |= {"experts": [], "weights": []}
    for file in (("run.csv", csv_bytes(rows)), ("run.jsonl", jsonl_bytes(rows))):
        trace = load(tmp_path, file, **SCORED)
        assert trace.routing.filter(step=4, layer=2).collect()["experts"][0].to_list() == [-1, -1]
        assert replayed(trace, margins=["0.2"])[0].all.slots == 40
    trace = load(tmp_path, ("ids.npy", npy_bytes(with_values("ids", 4, -1))), **FACTS)
    assert replayed(trace)[0].all.slots == 36


def test_layers_without_experts(tmp_path: Path) -> None:
    for moe_layers, n_layer in (("1-3", None), ("3,7,11", 12)):
        trace = load(tmp_path, arrays_with(), **SCORED, moe_layers=moe_layers, n_layer=n_layer)
        layers = [1, 2, 3] if n_layer is None else [3, 7, 11]
        assert list(trace.header.moe_layers) == layers
        assert trace.header.n_layer == (n_layer or 4)
        assert sorted(set(trace.routing.collect()["layer"])) == layers
        assert replayed(trace)[0].all.slots == 42


def test_the_last_layer_has_one_prefill_row_or_all(tmp_path: Path) -> None:
    rows = list_rows(RUN)
    fewer = [row for row in rows if row["layer"] < 2 or row["token"] >= 2]
    trace = load(tmp_path, ("run.csv", csv_bytes(fewer)), **SCORED)
    last = trace.routing.filter(phase=0, layer=2).collect()
    assert last["pos_in_graph"].to_list() == [2]
    assert trace.n_rows == 19
    assert load(tmp_path, ("run.csv", csv_bytes(rows)), **SCORED).n_rows == 21


def test_residency_flags_all_0_in_prefill(tmp_path: Path) -> None:
    lines = route_lines()
    at = HEADING.split(",").index("residency")
    cleared = []
    for line in lines:
        fields = line.split(",")
        if not line.startswith("#") and line != HEADING and fields[1] == "0":
            fields[at] = "0"
        cleared.append(",".join(fields))
    found = []
    for name, content in (("a", lines), ("b", cleared)):
        path = write_lines(tmp_path / f"{name}.csv", content)
        trace = open_trace(import_files([str(path)], str(tmp_path / f"{name}.trace")))
        found.append(replayed(trace)[0])
    assert found[0].all == found[1].all


# -- scores and weights --------------------------------------------------------------------------------------


def test_nan_weights(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        ("ids.npy", npy_bytes(RUN["ids"])),
        ("weights.npy", npy_bytes(RUN["weights"] * np.nan)),
        **FACTS,
    )
    assert np.isnan(trace.routing.collect()["weights"].to_numpy()).all()
    with pytest.raises(InputError, match="a weight is NaN"):
        replayed(trace, drops=["0.5"])
    assert replayed(trace)[0].all.slots == 42


def test_weights_that_do_not_sum_to_1(tmp_path: Path) -> None:
    for factor in (0.09, 0.79, 0.997):
        weights = RUN["weights"] * np.float32(factor)
        trace = load(tmp_path, arrays_with(weights=weights), **SCORED | {"weight_rule": None})
        kept = trace.routing.sort("step", "layer").collect()["weights"].to_numpy()
        assert np.array_equal(kept.reshape(weights.shape), weights)
    with pytest.warns(SimlabWarning, match=r"where the weight rule makes .* of the scores \(21 of 21 rows\)"):
        load(tmp_path, arrays_with(weights=RUN["weights"] * np.float32(0.79)), **SCORED)
    load(tmp_path, arrays_with(weights=RUN["weights"] * np.float32(0.997)), **SCORED)


def test_a_selection_bias_selects_and_does_not_weigh(tmp_path: Path) -> None:
    gate = (1 / (1 + np.exp(-RUN["logits"]))).astype(np.float32)
    biased = (gate + np.linspace(-0.5, 0.5, N_EXPERT)).astype(np.float32)
    ids = np.argsort(-biased, axis=2)[..., :2]
    given = {"ids": ids, "scores": biased}
    facts = FACTS | {"gating": "sigmoid", "score_space": "raw", "weight_rule": {"normalise": True}}
    with pytest.raises(
        InputError, match=r"outside 0 to 1, so it is a logit, or a selection bias .* or gate_probs"
    ):
        load(tmp_path, ("run.npz", npz_bytes(given)), **facts)
    weights = np.take_along_axis(gate, ids, axis=2)
    weights /= weights.sum(axis=2, keepdims=True)
    trace = load(tmp_path, ("run.npz", npz_bytes({**given, "gate_probs": gate, "weights": weights})), **facts)
    assert replayed(trace, drops=["0"])[0].decode.slots == 24


def test_group_masks_of_minus_inf_or_0(tmp_path: Path) -> None:
    masked = RUN["scores"].copy()
    masked[..., 4:] = 0
    ids = np.argsort(-masked, axis=2)[..., :2]
    weights = np.take_along_axis(masked, ids, axis=2)
    given = {"ids": ids, "weights": weights / weights.sum(axis=2, keepdims=True)}
    one = load(tmp_path, ("run.npz", npz_bytes({**given, "scores": masked})), **SCORED)
    first = replayed(one, margins=["1"])[0]
    masked[..., 4:] = -np.inf
    other = load(tmp_path, ("run.npz", npz_bytes({**given, "scores": masked})), **SCORED)
    # Of another file, with the same figures.
    second = replayed(other, margins=["1"])[0]
    assert dataclasses.replace(second, provenance=first.provenance) == first
    assert first.decode.substituted is not None
    assert first.decode.substituted > 0


def test_softmax_after_top_k(tmp_path: Path) -> None:
    chosen = np.exp(np.take_along_axis(RUN["logits"], RUN["ids"], axis=2))
    given = {
        "ids": RUN["ids"],
        "scores": RUN["logits"],
        "weights": chosen / chosen.sum(axis=2, keepdims=True),
    }
    facts = FACTS | {"gating": "logits", "score_space": "raw", "weight_rule": {"softmax_over_selected": True}}
    trace = load(tmp_path, ("run.npz", npz_bytes(given)), **facts)
    assert replayed(trace, margins=["0.2"], drops=["0.5"])[0].decode.reranked == 24


def test_fields_called_logits_that_hold_probabilities(tmp_path: Path) -> None:
    given = ("run.npz", npz_bytes({"ids": RUN["ids"], "router_logits": RUN["scores"]}))
    for gating in ("softmax", "logits"):
        facts = FACTS | {"gating": gating, "score_space": "raw"}
        with pytest.raises(
            InputError, match=r"array 'router_logits', token 0, layer 0: .*these are probabilities"
        ):
            load(tmp_path, given, **facts)
    given = ("run.npz", npz_bytes({"ids": RUN["ids"], "router_probs": RUN["logits"]}))
    with pytest.raises(InputError, match=r"array 'router_probs', .* is no probability"):
        load(tmp_path, given, **SCORED)


def test_exact_ties_and_all_scores_equal(tmp_path: Path) -> None:
    for scores in (np.full_like(RUN["scores"], 1 / N_EXPERT), np.round(RUN["scores"] * 4) / 4):
        total = scores.sum(axis=2, keepdims=True)
        scores = np.divide(scores, total, out=np.full_like(scores, 1 / N_EXPERT), where=total > 0)
        # Any of the tied ones: here those of the highest ids.
        ids = np.argsort(scores, axis=2, kind="stable")[..., ::-1][..., :2]
        trace = load(tmp_path, ("run.npz", npz_bytes({"ids": ids, "scores": scores})), **SCORED)
        assert sorted(map(sorted, experts_of(trace))) == sorted(map(sorted, ids.reshape(-1, 2).tolist()))
        zero, wide = replayed(trace, margins=["0", "0.5"])
        assert zero.decode.substituted == 0
        assert wide.decode.slots == 24


def test_nan_scores(tmp_path: Path) -> None:
    scores = RUN["scores"].copy()
    scores[3] = np.nan
    scores[4, 0, 0] = np.nan
    facts = SCORED | {"weight_rule": None}
    ids = RUN["ids"].copy()
    ids[4, 0] = np.argsort(-np.where(np.isnan(scores), -1, scores)[4, 0])[:2]
    trace = load(tmp_path, ("run.npz", npz_bytes({"ids": ids, "scores": scores})), **facts)
    assert replayed(trace, margins=["0.3"])[0].decode.slots == 24


# -- models --------------------------------------------------------------------------------------------------


def test_experts_that_are_never_routed(tmp_path: Path) -> None:
    trace = load(tmp_path, ("ids.npy", npy_bytes(RUN["ids"])), **FACTS | {"n_expert": 512})
    assert trace.header.expert_bytes == 512 * 3 * 1000
    assert replayed(trace)[0].all.slots == 42
