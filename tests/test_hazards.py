"""What real traces and models contain: a table of the hazards and the tests that hold a reader to each.

Tests that other modules had no place for stand here (files, ids, rows) and in test_hazards_shapes.py (shapes, scores,
weights), each named after its hazard.
"""

from __future__ import annotations

import ast
import json
from functools import cache
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
    files_of,
    files_without_scores,
    fingerprint,
    jsonl_bytes,
    list_rows,
    load,
    npy_bytes,
    replayed,
    with_values,
)
from route_files import route_lines, write_lines

import simlab
from simlab.cells import build_cells
from simlab.errors import InputError, SimlabWarning
from simlab.trace.importer import import_files

HAZARDS: dict[str, list[str]] = {
    # Files
    "one version tag, nine or ten columns": ["test_import.py::test_nine_columns"],
    "entry bytes of a layer missing": [
        "test_import.py::test_refusals", "test_import_dumps.py::test_what_is_refused",
        "test_hazards.py::test_entry_bytes_missing_for_one_layer",
    ],
    "a record cut short at its end": [
        "test_import_cut.py::test_a_cut_file_keeps_exactly_its_complete_graphs",
        "test_hazards.py::test_a_record_cut_short_keeps_its_complete_tokens",
    ],
    "a Git-LFS pointer in place of data": [
        "test_import.py::test_refusals", "test_hazards.py::test_a_git_lfs_pointer_of_every_format"
    ],
    "quoted text with commas": ["test_import.py::test_line_ends_quotes_column_order_and_extra_columns"],
    "Windows line ends": [
        "test_import.py::test_line_ends_quotes_column_order_and_extra_columns",
        "test_import_dumps.py::test_rows_in_any_order_and_lists_in_any_dress",
    ],
    "a header with another expert count than the rows": [
        "test_import.py::test_refusals", "test_import_dumps.py::test_what_is_refused"
    ],
    "an empty file, or a header only": [
        "test_import.py::test_refusals", "test_hazards.py::test_an_empty_file_of_every_format",
        "test_hazards.py::test_a_table_of_a_heading_only",
    ],
    # Ids
    "-1 or n_expert as padding": [
        "test_import.py::test_padding_and_short_rows", "test_hazards.py::test_minus_one_or_n_expert_is_padding"
    ],
    "ids out of range": [
        "test_hostile_files.py::test_hostile_values_in_columns", "test_import_dumps.py::test_what_is_refused"
    ],
    "one expert twice in a routing": [
        "test_import.py::test_the_same_expert_twice_is_kept_with_one_warning",
        "test_hazards.py::test_one_expert_twice_in_a_routing",
    ],
    "padding rows of expert 0": ["test_hazards.py::test_padding_rows_that_all_say_expert_0"],
    "uint8 ids of 512 experts": ["test_hazards.py::test_uint8_overflow_at_512_experts"],
    # Rows
    "a profiling run in front": ["test_hazards.py::test_a_profiling_run_in_front"],
    "positions that restart": ["test_hazards.py::test_positions_that_restart"],
    "no routing row of the last sampled token": ["test_hazards.py::test_the_last_sampled_token_has_no_row"],
    "a draft layer that shares layer 0": ["test_hazards.py::test_a_draft_layer_that_shares_layer_0"],
    "several turns, the cache kept": [
        "test_import.py::test_a_new_turn_starts_a_graph", "test_hazards.py::test_several_turns_keep_the_cache"
    ],
    "speculative steps of several tokens": ["test_hazards.py::test_speculative_steps_are_one_batch"],
    "step -1": [
        "test_import.py::test_rows_without_a_position_stay_in_their_graph", "test_hazards.py::test_step_minus_one"
    ],
    # Shape
    "k overridden at run time": [
        "test_import.py::test_qwen_shape_and_header", "test_import.py::test_fewer_slots_than_the_header_says",
        "test_hazards_shapes.py::test_k_overridden_at_run_time",
    ],
    "k that differs per event": ["test_hazards_shapes.py::test_k_differs_per_event"],
    "no expert for a token": ["test_hazards_shapes.py::test_zero_experts_for_a_token"],
    "layer 0 dense, layers without experts": ["test_hazards_shapes.py::test_layers_without_experts"],
    "one prefill row in the last layer, or all": [
        "test_hazards_shapes.py::test_the_last_layer_has_one_prefill_row_or_all"
    ],
    "residency flags that are all 0": [
        "test_import.py::test_nothing_recorded_is_read_back",
        "test_hazards_shapes.py::test_residency_flags_all_0_in_prefill",
    ],
    # Scores and weights
    "NaN weights": ["test_import.py::test_padding_and_short_rows", "test_hazards_shapes.py::test_nan_weights"],
    "weights that do not sum to 1": ["test_hazards_shapes.py::test_weights_that_do_not_sum_to_1"],
    "a sigmoid with a selection bias": [
        "test_replay.py::test_biased_sigmoid_router_as_reference",
        "test_hazards_shapes.py::test_a_selection_bias_selects_and_does_not_weigh",
    ],
    "masks of groups, -inf or 0": [
        "test_layout_replay.py::test_masked_scores_replay_and_are_never_picked",
        "test_hazards_shapes.py::test_group_masks_of_minus_inf_or_0",
    ],
    "a softmax after the top k": [
        "test_replay.py::test_softmax_after_top_k_as_reference", "test_hazards_shapes.py::test_softmax_after_top_k"
    ],
    "logits that are probabilities": ["test_hazards_shapes.py::test_fields_called_logits_that_hold_probabilities"],
    "exact ties, and all scores equal": ["test_hazards_shapes.py::test_exact_ties_and_all_scores_equal"],
    "NaN scores": [
        "test_replay.py::test_nan_gate_in_scores_is_refused_by_drops", "test_hazards_shapes.py::test_nan_scores"
    ],
    # GGUF
    "fused gate and up, split shards, mixed quantisation, companion tensors": [
        "test_tiny_models.py::test_the_file_holds_what_the_layout_says",
        "test_tiny_models.py::test_a_layout_streams_bit_for_bit_and_routes_by_token",
        "test_tiny_models.py::test_the_sharded_model_is_the_split_one",
    ],
    "experts that are never routed": ["test_hazards_shapes.py::test_experts_that_are_never_routed"],
    # Callback and timing
    "ids that are a strided view": ["test_gates.py::test_ids_read_without_their_stride_are_caught"],
    "an exception in the callback": ["test_engine.py::test_an_exception_in_the_asking_path_ends_the_decode"],
    "direct reads that are refused": ["test_engine.py::test_direct_reads_that_are_refused_fall_back_aloud"],
}  # fmt: skip
"""Hazard to the tests that cover it."""

ALL_FORMATS = {**files_of(RUN), **files_without_scores(RUN)}


@cache
def names_of_tests(module: Path) -> set[str]:
    tree = ast.parse(module.read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def test_every_hazard_has_tests_that_exist() -> None:
    folder = Path(__file__).parent
    for hazard, tests in HAZARDS.items():
        assert tests, hazard
        for test in tests:
            file, _, name = test.partition("::")
            assert name in names_of_tests(folder / file), f"{hazard}: {test}"
    listed = {test for tests in HAZARDS.values() for test in tests}
    for file in ("test_hazards.py", "test_hazards_shapes.py"):
        here = {f"{file}::{name}" for name in names_of_tests(folder / file)}
        assert here - listed <= {"test_hazards.py::test_every_hazard_has_tests_that_exist"}


# -- files ---------------------------------------------------------------------------------------------------


def test_entry_bytes_missing_for_one_layer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--expert-bytes: has no layer 1, where .*run.npz routes experts"):
        load(tmp_path, arrays_with(), **SCORED | {"expert_bytes": {"0": 9, "2": 9}})


def test_a_record_cut_short_keeps_its_complete_tokens(tmp_path: Path) -> None:
    rows = list_rows(RUN, ("ids", "weights"))
    csv, jsonl = csv_bytes(rows), jsonl_bytes(rows)
    cuts = {
        "ids.npy": npy_bytes(RUN["ids"])[:-30],  # two tokens of 24 bytes are no longer whole
        "a.csv": csv[:-4],
        "b.csv": csv[: csv.rfind(b"\n", 0, -1) + 1],  # at a line end: a layer of the last token is missing
        "a.jsonl": jsonl[:-4],
        "b.jsonl": jsonl[: jsonl.rfind(b"\n", 0, -1) + 1],
    }
    for name, data in cuts.items():
        with pytest.warns(SimlabWarning, match="cut short at its end; using its [56] complete tokens"):
            trace = load(tmp_path, (name, data), **FACTS)
        n_tokens = 5 if name == "ids.npy" else 6
        assert trace.n_rows == 3 * n_tokens, name
    with pytest.raises(InputError, match="holds no complete step"):
        load(tmp_path, ("a.csv", csv[: csv.find(b"0,1,") + 4]), **FACTS)


@pytest.mark.parametrize("name", sorted(ALL_FORMATS))
def test_a_git_lfs_pointer_of_every_format(name: str, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    with pytest.raises(InputError, match="a Git-LFS pointer"):
        load(tmp_path, (ALL_FORMATS[name][0], pointer), **SCORED)


@pytest.mark.parametrize("name", sorted(ALL_FORMATS))
def test_an_empty_file_of_every_format(name: str, tmp_path: Path) -> None:
    for empty in (b"", b"\n \n"):
        with pytest.raises(InputError, match="the file is empty"):
            load(tmp_path, (ALL_FORMATS[name][0], empty), **SCORED)


def test_a_table_of_a_heading_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a table without rows"):
        load(tmp_path, ("run.csv", b"token,layer,slot,expert\n"), **FACTS)
    with pytest.raises(InputError, match=r"shape \[0, 3, 2\], must be \[tokens, layers, k\]"):
        load(tmp_path, ("ids.npy", npy_bytes(RUN["ids"][:0])), **FACTS)


# -- ids -----------------------------------------------------------------------------------------------------


def test_minus_one_or_n_expert_is_padding(tmp_path: Path) -> None:
    for padding in (-1, N_EXPERT):
        ids = with_values("ids", (4, 1, 1), padding)
        weights = with_values("weights", (4, 1, 1), 0)
        trace = load(tmp_path, arrays_with(ids=ids, weights=weights), **SCORED | {"weight_rule": None})
        row = trace.routing.filter(step=4, layer=1).collect()
        assert row["experts"][0].to_list() == [RUN["ids"][4, 1, 0], -1]
        with pytest.raises(
            InputError, match=r"token 4, layer 1, slot 1: .*, an id of padding, with a weight"
        ):
            load(tmp_path, arrays_with(ids=ids), **SCORED)


def test_one_expert_twice_in_a_routing(tmp_path: Path) -> None:
    ids = RUN["ids"].copy()
    ids[3, 2, 1] = ids[3, 2, 0]
    with pytest.warns(SimlabWarning, match="token 3, layer 2: the same expert twice in one routing"):
        trace = load(tmp_path, ("ids.npy", npy_bytes(ids)), **FACTS)
    assert trace.routing.filter(step=3, layer=2).collect()["experts"][0].to_list() == ids[3, 2].tolist()


def test_padding_rows_that_all_say_expert_0(tmp_path: Path) -> None:
    ids = with_values("ids", slice(5, 7), 0)
    with pytest.raises(
        InputError, match=r"token 5, layer 0: expert 0 in every slot .*2 such tokens.*--skip-padding"
    ):
        load(tmp_path, ("ids.npy", npy_bytes(ids)), **FACTS)
    trace = load(tmp_path, ("ids.npy", npy_bytes(ids)), **FACTS, skip_padding=True)
    assert trace.n_rows == 15
    assert trace.tokens.collect()["step"].to_list() == [2, 3, 4]


def test_uint8_overflow_at_512_experts(tmp_path: Path) -> None:
    ids = np.arange(42, dtype=np.uint8).reshape(7, 3, 2)
    facts = FACTS | {"n_expert": 512}
    with pytest.raises(
        InputError, match="a type that ends at 255, and of 512 experts the higher ones have wrapped"
    ):
        load(tmp_path, ("ids.npy", npy_bytes(ids)), **facts)
    assert load(tmp_path, ("ids.npy", npy_bytes(ids.astype(np.int16))), **facts).n_rows == 21
    assert load(tmp_path, ("ids.npy", npy_bytes(ids)), **FACTS | {"n_expert": 256}).n_rows == 21


# -- rows ----------------------------------------------------------------------------------------------------


def test_a_profiling_run_in_front(tmp_path: Path) -> None:
    ids = np.concatenate([np.repeat(RUN["ids"][:1], 40, axis=0), RUN["ids"][1:]])
    file = ("ids.npy", npy_bytes(ids))
    with pytest.raises(
        InputError, match=r"first 40 tokens have one and the same routing .*--skip-tokens 40 leaves"
    ):
        load(tmp_path, file, **FACTS)
    assert load(tmp_path, file, **FACTS, skip_tokens=40).n_rows == 18
    assert load(tmp_path, file, **FACTS, skip_tokens=0).n_rows == 138


def test_positions_that_restart(tmp_path: Path) -> None:
    step = np.array([0, 1, 2, 3, 0, 1, 2])
    with pytest.warns(SimlabWarning, match="positions start again at 0 1 times; each is taken as a new turn"):
        trace = load(tmp_path, arrays_with(position=step), **SCORED | {"prefill": [2, 1]})
    tokens = trace.tokens.collect()
    assert tokens["turn"].to_list() == [0, 0, 0, 1, 1, 1]
    assert tokens["step"].to_list() == [1, 2, 3, 0, 1, 2]
    rows = [
        {"step": int(step[r["token"]]), **{n: r[n] for n in ("layer", "experts")}} for r in list_rows(RUN)
    ]
    with pytest.raises(
        InputError, match=r"line 14, field 'layer': .* second time; positions .* need a column 'turn'"
    ):
        load(tmp_path, ("run.csv", csv_bytes(rows)), **FACTS)
    rows = [{"turn": int(r["token"] > 3), **row} for r, row in zip(list_rows(RUN), rows, strict=True)]
    trace = load(tmp_path, ("run.csv", csv_bytes(rows)), **FACTS | {"prefill": [2, 1]})
    assert trace.tokens.collect()["turn"].to_list() == [0, 0, 0, 1, 1, 1]


def test_the_last_sampled_token_has_no_row(tmp_path: Path) -> None:
    ids = np.arange(100, 108)
    trace = load(tmp_path, arrays_with(token_ids=ids), **SCORED)
    tokens = trace.tokens.collect()
    assert tokens["token"].to_list() == [102, 103, 104, 105, 106]
    assert tokens["next_token"].to_list() == [103, 104, 105, 106, 107]
    trace = load(tmp_path, arrays_with(token_ids=ids[:-1]), **SCORED)
    assert trace.tokens.collect()["next_token"].to_list() == [103, 104, 105, 106, None]
    content = fingerprint(RUN)
    assert len(content["generated_only"]) == len(content["router_data"]) + 1
    facts = {"n_expert": N_EXPERT, "expert_bytes": 9}
    with pytest.warns(SimlabWarning, match="has no prompt"):
        assert load(tmp_path, ("f.json", json.dumps(content).encode()), **facts).n_rows == 21


def test_a_draft_layer_that_shares_layer_0(tmp_path: Path) -> None:
    lines = route_lines()
    last = int(lines[-1].split(",")[2])
    draft = [f"0,1,{last},0,{slot},{slot},0.5,0,0,0" for slot in range(2)]
    after = [f"0,1,{last + 1},{layer},{slot},{slot},0.5,0,0,0" for layer in range(3) for slot in range(2)]
    path = write_lines(tmp_path / "r.csv", [*lines, *draft, *after])
    with pytest.warns(SimlabWarning, match=rf"line {len(lines) + 1}, field 'layer': layer 0 again, alone"):
        import_files([str(path)], str(tmp_path / "t.trace"))
    rows = list_rows(RUN, ("ids",))
    with pytest.raises(InputError, match="line 5, field 'layer': layer 0 of this token a second time"):
        load(tmp_path, ("run.csv", csv_bytes([*rows[:3], rows[0], *rows[3:]])), **FACTS)


def test_several_turns_keep_the_cache(tmp_path: Path) -> None:
    ids = np.concatenate([RUN["ids"], RUN["ids"][-1:]])
    facts = FACTS | {"turns": [7, 1], "prefill": [3, 1]}
    trace = load(tmp_path, ("ids.npy", npy_bytes(ids)), **facts)
    assert trace.tokens.collect()["phase"].to_list() == [0, 1, 1, 1, 1, 0]
    one, two = simlab.sweep(trace, build_cells(budgets=["100%", "1.1cycles"]))
    # The prompt of the second turn routes as the last token of the first did: all of it is still there.
    assert one.all.misses == len({(la, int(e)) for t in ids for la in range(3) for e in t[la]})
    assert two.all.hits >= 6


def test_speculative_steps_are_one_batch(tmp_path: Path) -> None:
    graph = np.array([0, 0, 0, 1, 1, 2, 2])
    trace = load(
        tmp_path,
        arrays_with(graph=graph, phase=np.array([0, 0, 0, 1, 1, 1, 1])),
        **SCORED | {"prefill": None},
    )
    rows = trace.routing.filter(graph=1).collect()
    assert rows["layer"].to_list() == [0, 0, 1, 1, 2, 2]
    assert rows["pos_in_graph"].to_list() == [0, 1] * 3
    union = sum(
        len(set(RUN["ids"][pair, layer].ravel().tolist())) for pair in ([3, 4], [5, 6]) for layer in range(3)
    )
    assert replayed(trace)[0].decode.lookups == union
    with pytest.raises(InputError, match="graph 0 goes on at token 2, where the turn or phase changes"):
        load(tmp_path, arrays_with(graph=graph), **SCORED | {"prefill": 2})


def test_step_minus_one(tmp_path: Path) -> None:
    step = np.array([0, 1, 2, -1, 4, 5, 6])
    trace = load(tmp_path, arrays_with(step=step), **SCORED)
    assert trace.tokens.collect()["step"].to_list() == [2, -1, 4, 5, 6]
    with pytest.raises(InputError, match="'step' of token 3: -2, must be from -1"):
        load(tmp_path, arrays_with(step=np.where(step < 0, -2, step)), **SCORED)
