"""Importing arrays, tables and fingerprints: every format gives the same trace, and says what it lacks."""

from __future__ import annotations

import base64
import json
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from dump_files import (
    ENTRY_BYTES,
    FACTS,
    N_EXPERT,
    RUN,
    SCORED,
    arrays_with,
    csv_bytes,
    files_of,
    files_without_scores,
    fingerprint,
    list_rows,
    load,
    npy_bytes,
    npz_bytes,
    plain,
    slot_rows,
    with_values,
    write,
)
from route_files import shared

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError, RunError, SimlabWarning
from simlab.trace import parquet_probe
from simlab.trace.importer import import_files
from simlab.trace.store import Trace, open_trace
from simlab.types import WeightRule

ENDS_THE_READER = zlib.decompress(base64.b85decode(
    b"c-oDVy-wpm5XaY>T$F+$1-ptR7jCdXAkNt%N{nch5W<D8Bu#P=jdQk1bh#MWfxt^pQBv^?6o?0)yhljEQ&2KvTRz=M7j9+E%+AdJ"
    b"w>y^IlARLEvH~j{G0MpA#Rw)hSQlK5<p`mWqzcKftXd|yf?E7E^?$e%MmXhX{LBzWo-8EMf0M@cjT@w-7sa?&{$wft&C0pg7j7_3"
    b"VRLFcQle^HFu|c2q8B9%=QIu(RgVs`f$vWN%CajonJ$T=`^9m>2fV7OJI1Y|EqWpRSB5PU<AG|6hvlys#)<Kq(LNZ2zhNW4qnsLf"
    b"aLYJGaY=SMr`_%F`_TPq7oX^7T<c#YtU8+N73{Cu$v#RQN*T&p<lAz+1@+ks^B_7;`i{ZvhPXLJBT-*FMs!5pl}SIAVh8m))}xc+"
    b"a~f#+z2U6iYno86exNu1((j`gH1^B=9`@{oSdZ>gi<-Wrdf?U1L4>{?bN3Reh4Yy*Jr$%)oTrxXorV?kyIYbJPg?%i4nlqP;$}MZ"
    b"Cu{nZ8-yc&qKnParm3$EE=OZWuXvUz2F@4Hb411Ss=_I4iAvQrEn8S+&l6t7b{$KssXH1W@k1Q=R$K79y#shxuYL"
))  # fmt: skip
"""A parquet file of one row and one damaged byte: polars asks for exabytes, which ends the process."""
NO_PROMPT = "has no prompt, its first token is at position {}; the cache starts empty"
FORMATS, SCORELESS = sorted(files_of(RUN)), sorted(files_without_scores(RUN))


def column(trace: Trace, name: str) -> np.ndarray:
    """A column of the routing table as `[tokens, layers, ..]`."""
    frame = trace.routing.sort("step", "layer").collect()
    layers = frame["layer"].n_unique()
    values = frame[name].to_numpy()
    return values.reshape(-1, layers, *values.shape[1:])


# ---------------------------------------------------------------------------------------------------------
# What is read


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_with_scores_gives_the_same_trace(name: str, tmp_path: Path) -> None:
    trace = load(tmp_path, files_of(RUN)[name], **SCORED)
    header = trace.header
    assert (header.n_layer, header.n_expert, header.n_expert_used) == (3, N_EXPERT, 2)
    assert header.entry_bytes == dict.fromkeys(range(3), ENTRY_BYTES)
    assert (header.gating, header.score_space) == ("softmax", "prob")
    assert header.weight_rule == WeightRule(normalise=True)
    assert (header.route, header.evict, header.budget_bytes) == ("original", None, None)
    assert np.array_equal(column(trace, "router_experts"), RUN["ids"])
    assert np.array_equal(column(trace, "weights"), RUN["weights"])
    assert np.array_equal(column(trace, "scores"), RUN["scores"])
    rows = trace.routing.collect()
    # One prefill graph of three tokens, layer by layer, then one graph per token.
    assert rows["layer"].to_list()[:9] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert rows["pos_in_graph"].to_list()[:4] == [0, 1, 2, 0]
    assert rows["graph"].to_list() == [0] * 9 + [g for g in (1, 2, 3, 4) for _ in range(3)]
    tokens = trace.tokens.collect()
    assert tokens["phase"].to_list() == [0, 1, 1, 1, 1]
    assert tokens["step"].to_list() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", SCORELESS)
def test_every_format_without_scores_gives_the_same_trace(name: str, tmp_path: Path) -> None:
    is_fingerprint = name == "fingerprint"
    facts = {n: v for n, v in FACTS.items() if n != "prefill" or not is_fingerprint}
    with (
        pytest.warns(SimlabWarning, match=NO_PROMPT.format(5)) if is_fingerprint else nullcontext() as caught
    ):
        trace = load(tmp_path, files_without_scores(RUN)[name], **facts)
    assert len(caught or [1]) == 1
    assert np.array_equal(column(trace, "router_experts"), RUN["ids"])
    if name != "npy":
        assert np.array_equal(column(trace, "weights"), RUN["weights"])
    assert not trace.has_scores
    assert trace.header.gating is None


def test_an_imported_run_is_swept_like_a_recorded_one(tmp_path: Path) -> None:
    import simlab

    trace = load(tmp_path, files_of(RUN)["npz"], **SCORED)
    cells = build_cells(budgets=["1.5cycles"], margins=["0", "1"])
    plain_cell, margin = simlab.sweep(trace, cells)
    # By hand: every lookup of a cache of nine entries, least recent first out, over layer-major batches.
    cache: list[tuple[int, int]] = []
    hits = lookups = 0
    ids = RUN["ids"]
    for graph in [range(3), *([t] for t in range(3, 7))]:
        for layer in range(3):
            batch = set()
            for token in graph:
                for expert in ids[token, layer].tolist():
                    key = (layer, expert)
                    lookups += key not in batch
                    hits += key in cache and key not in batch
                    batch.add(key)
                    cache = [c for c in cache if c != key] + [key]
            while len(cache) > 9 and cache[0] not in batch:
                cache.pop(0)
    assert (plain_cell.all.hits, plain_cell.all.lookups) == (hits, lookups)
    assert (margin.decode.substituted or 0) > 0
    assert margin.decode.misses < plain_cell.decode.misses


def test_logits_of_a_softmax_router_rank_as_they_are_and_weigh_by_their_softmax(tmp_path: Path) -> None:
    arrays = {"topk_ids": RUN["ids"], "router_logits": RUN["logits"], "topk_weights": RUN["weights"]}
    facts = SCORED | {"score_space": "raw"}
    trace = load(tmp_path, ("run.npz", npz_bytes(arrays)), **facts)
    assert (trace.header.gating, trace.header.score_space) == ("logits", "raw")
    assert np.array_equal(column(trace, "scores"), RUN["logits"])
    assert np.allclose(column(trace, "gate_probs"), RUN["scores"], rtol=1e-6, atol=0)


def test_facts_from_a_sidecar_and_options_beat_it(tmp_path: Path) -> None:
    sidecar = SCORED | {"expert_bytes": {"1": 10, "2": 20, "5": 30}, "moe_layers": "1-2,5", "model": "m"}
    (tmp_path / "run.json").write_text(json.dumps(sidecar))
    trace = load(tmp_path, ("run.npz", npz_bytes(plain(RUN))))
    assert trace.header.entry_bytes == {1: 10, 2: 20, 5: 30}
    assert (trace.header.n_layer, trace.header.model) == (6, "m")
    trace = load(tmp_path, ("run.npz", npz_bytes(plain(RUN))), expert_bytes=[7, 8, 9], n_layer=9)
    assert trace.header.entry_bytes == {1: 7, 2: 8, 5: 9}
    assert trace.header.n_layer == 9
    # Named among the files, it may be called anything.
    (tmp_path / "run.json").rename(tmp_path / "facts.json")
    other = load(tmp_path, ("run.npz", npz_bytes(plain(RUN))), ("facts.json", json.dumps(sidecar).encode()))
    assert other.header.entry_bytes == {1: 10, 2: 20, 5: 30}


def test_turns_and_prompts(tmp_path: Path) -> None:
    trace = load(tmp_path, ("ids.npy", npy_bytes(RUN["ids"])), **FACTS | {"turns": [4, 3], "prefill": [2, 1]})
    tokens = trace.tokens.collect()
    assert tokens["turn"].to_list() == [0, 0, 0, 1, 1, 1]
    assert tokens["phase"].to_list() == [0, 1, 1, 0, 1, 1]
    assert tokens["step"].to_list() == [1, 2, 3, 4, 5, 6]


def test_several_npy_files_are_told_apart_by_their_names(tmp_path: Path) -> None:
    files = [(f"a-{name}.npy", npy_bytes(RUN[name])) for name in ("ids", "weights", "scores")]
    trace = load(tmp_path, *files, **SCORED)
    assert np.array_equal(column(trace, "scores"), RUN["scores"])
    assert np.array_equal(column(trace, "weights"), RUN["weights"])


def test_half_precision_is_read_exactly_and_said(tmp_path: Path) -> None:
    import ml_dtypes
    from safetensors.numpy import save

    for dtype in (np.float16, ml_dtypes.bfloat16):
        arrays = plain(RUN) | {"scores": RUN["scores"].astype(dtype)}
        with pytest.warns(SimlabWarning, match="near-ties are ties"):
            trace = load(tmp_path, ("run.safetensors", save(arrays)), **SCORED)
        assert np.array_equal(column(trace, "scores"), RUN["scores"].astype(dtype).astype(np.float32))
    with pytest.raises(InputError, match="is it bfloat16"):
        load(tmp_path, ("run.npz", npz_bytes(arrays)), **SCORED)


def test_any_names_by_a_map(tmp_path: Path) -> None:
    arrays = {"a": RUN["ids"], "b": RUN["scores"], "ids": RUN["logits"]}
    trace = load(tmp_path, ("run.npz", npz_bytes(arrays)), **SCORED, columns={"ids": "a", "scores": "b"})
    assert np.array_equal(column(trace, "router_experts"), RUN["ids"])
    rows = [{"t": row["token"], "l": row["layer"], "e": row["experts"]} for row in list_rows(RUN)]
    columns = {"ids": "e", "index": "t", "layer": "l"}
    trace = load(tmp_path, ("run.csv", csv_bytes(rows)), **FACTS, columns=columns)
    assert np.array_equal(column(trace, "router_experts"), RUN["ids"])


def test_rows_in_any_order_and_lists_in_any_dress(tmp_path: Path) -> None:
    rows = slot_rows(RUN)
    np.random.default_rng(3).shuffle(rows)  # type: ignore[arg-type]
    trace = load(tmp_path, ("run.csv", csv_bytes(rows)), **FACTS)
    assert np.array_equal(column(trace, "router_experts"), RUN["ids"])
    for form in ('"[{}, {}]"', "{};{}", '"{},{}"', "({} {})"):
        lines = ["token,layer,experts"]
        lines += [f"{r['token']},{r['layer']}," + form.format(*r["experts"]) for r in list_rows(RUN)]
        trace = load(tmp_path, ("run.csv", "\r\n".join([*lines, ""]).encode()), **FACTS)
        assert np.array_equal(column(trace, "router_experts"), RUN["ids"]), form


def test_the_recorded_fingerprint(tmp_path: Path) -> None:
    path = shared("fingerprint/gpt-oss-20b-marketing.json")
    facts = {"n_expert": 32, "expert_bytes": 13_226_880, "gating": "logits", "arch": "gpt-oss"}
    with pytest.warns(SimlabWarning, match=NO_PROMPT.format(146)):
        trace = open_trace(import_files([str(path)], str(tmp_path / "t.trace"), False, facts))
    content = json.loads(path.read_text())
    assert trace.n_rows == 30 * 24
    tokens = trace.tokens.collect()
    assert tokens["step"].to_list() == list(range(146, 176))
    assert set(tokens["phase"]) == {1}
    for token in (0, 29):
        said = content["router_data"][token][f"token_{146 + token}"]["layer_23"]
        row = trace.routing.filter(step=146 + token, layer=23).collect()
        assert row["experts"][0].to_list() == said["selected_experts"]
        assert row["weights"][0].to_list() == said["selected_probs"]


def test_through_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, files_of(RUN)["npz"])
    words = ["--n-expert", "8", "--expert-bytes", "10,20,30", "--gating", "softmax", "--score-space", "prob"]
    words += ["--weight-rule", "normalise=1,scale=1", "--prefill", "3", "--moe-layers", "1-3"]
    assert main(["import", str(path), "--out", str(tmp_path / "t.trace"), *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.endswith("21 routing rows, 3 MoE layers, 3 prefill and 4 decode tokens\n")
    header = open_trace(tmp_path / "t.trace").header
    assert (header.entry_bytes, header.weight_rule) == ({1: 10, 2: 20, 3: 30}, WeightRule(scale=1.0))
    assert main(["info", str(tmp_path / "t.trace")]) == 0
    assert "policy      original\n" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------
# What is refused


REFUSED: dict[str, tuple[tuple[str, bytes], dict[str, Any], str]] = {
    "no bytes": (arrays_with(), SCORED | {"expert_bytes": None}, "--expert-bytes: is missing"),
    "bytes 0": (arrays_with(), SCORED | {"expert_bytes": 0}, "--expert-bytes: 0, must be a whole number from 1"),
    "bytes of too few layers": (arrays_with(), SCORED | {"expert_bytes": [1, 2]}, "--expert-bytes: 2 sizes"),
    "no gating": (arrays_with(), SCORED | {"gating": None}, "--gating: is missing"),
    "no space": (arrays_with(), SCORED | {"score_space": None, "weight_rule": None}, "--score-space: is missing"),
    "no n_expert": (("ids.npy", npy_bytes(RUN["ids"])), FACTS | {"n_expert": None}, "--n-expert: is missing"),
    "other n_expert": (arrays_with(), SCORED | {"n_expert": 9}, "8 scores in a row, but --n-expert says 9"),
    "no ids": (("run.npz", npz_bytes({"x": RUN["ids"]})), FACTS, "no array of expert ids"),
    "float ids": (arrays_with(ids=RUN["ids"].astype(float)), SCORED, "array 'ids': of type float64"),
    "flat ids": (arrays_with(ids=RUN["ids"][0]), SCORED, "of shape [3, 2], must be [tokens, layers, k]"),
    "axes swapped": (
        arrays_with(ids=RUN["ids"].swapaxes(0, 1)), SCORED | {"moe_layers": [0, 1, 2]}, "look like [layers, tokens, k]"
    ),
    "weights of another shape": (arrays_with(weights=RUN["weights"][1:]), SCORED, "must be [7, 3, 2]"),
    "two arrays of scores": (arrays_with(router_logits=RUN["logits"]), SCORED, "could both be the scores"),
    "an id too high": (arrays_with(ids=with_values("ids", (4, 1, 0), 99)), SCORED, "token 4, layer 1, slot 0: 99"),
    "a negative weight": (
        arrays_with(weights=with_values("weights", (2, 0, 1), -0.5)), SCORED,
        "'weights', token 2, layer 0, slot 1: -0.5",
    ),
    "complex scores": (arrays_with(scores=RUN["scores"].astype(complex)), SCORED, "of type complex128"),
    "pickled": (("run.npz", npz_bytes({"ids": np.array([{}, 1], object)})), FACTS, "of type object"),
    "sigmoid probabilities": (arrays_with(), SCORED | {"gating": "sigmoid"}, "--score-space: prob, but a sigmoid"),
    "softmax over selected of probabilities": (
        arrays_with(), SCORED | {"weight_rule": {"softmax_over_selected": True}}, "--weight-rule: softmax_over"
    ),
    "unknown rule": (arrays_with(), SCORED | {"weight_rule": {"x": 1}}, "--weight-rule: \"x\" is unknown"),
    "unknown column": (arrays_with(), SCORED | {"columns": {"ids": "zz"}}, "has no array \"zz\""),
    "prompt too long": (arrays_with(), SCORED | {"prefill": 8}, "--prefill: 8 tokens, but turn 0"),
    "turns that do not add up": (arrays_with(), SCORED | {"turns": [3, 3]}, "--turns: 6 tokens in all"),
    "skip everything": (arrays_with(), SCORED | {"skip_tokens": 7}, "--skip-tokens: 7, but"),
    "a slot twice": (
        ("run.csv", csv_bytes([*slot_rows(RUN), slot_rows(RUN)[4]])), FACTS, "line 44, field 'layer': layer 2, slot 0"
    ),
    "a row twice": (
        ("run.csv", csv_bytes([*list_rows(RUN), list_rows(RUN)[4]])), SCORED, "line 23, field 'layer': layer 1 of this"
    ),
    "a short list of scores": (
        ("run.csv", csv_bytes([*list_rows(RUN)[:-1], list_rows(RUN)[-1] | {"scores": [0.5]}])), SCORED,
        "line 22, field 'scores': 1 numbers, where the first row has 8"
    ),
    "a word in a list": (
        ("run.csv", b"token,layer,experts\n0,0,1 x\n"), FACTS, "line 2, field 'experts': \"x\" is not a whole number"
    ),
    "no layer": (
        ("run.csv", b"token,expert,slot\n0,0,1\n"), FACTS | {"columns": {"ids": "expert"}}, "no column of layer"
    ),
    "text ids in JSONL": (("run.jsonl", b'{"token":0,"layer":0,"experts":["1"]}\n'), FACTS, "line 1, field 'experts'"),
    "another kind of JSONL row": (
        ("run.jsonl", b'{"token":0,"layer":0,"experts":[1]}\n7\n'), FACTS, "line 2: 7, must be a JSON object"
    ),
    "a fingerprint of two tokens in one": (
        ("f.json", json.dumps({"router_data": [{"token_1": {}, "token_2": {}}]}).encode()), FACTS, "router_data[0]: "
    ),
    "a fingerprint that goes back": (
        ("f.json", json.dumps({"router_data": fingerprint(RUN)["router_data"][::-1]}).encode()),
        {"n_expert": 8, "expert_bytes": 9}, "router_data[1]: 'token_10' after token_11"
    ),
    "facts alone": (("f.json", json.dumps(FACTS).encode()), {}, "model facts, and no routings"),
    "a JSON list": (("f.json", b"[1]"), FACTS, "one JSON object per line"),
    "a git lfs pointer": (("run.npz", b"version https://git-lfs.github.com/spec/v1\n"), FACTS, "a Git-LFS pointer"),
    "a cut npz": (("run.npz", npz_bytes(plain(RUN))[:-30]), SCORED, "cut short or damaged"),
    "a cut safetensors": (("run.safetensors", files_of(RUN)["safetensors"][1][:-30]), SCORED, "not a readable"),
    "a cut parquet": (("run.parquet", files_of(RUN)["parquet lists"][1][:-30]), SCORED, "not a readable parquet"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    file, facts, message = REFUSED[case]
    path = write(tmp_path, file)
    with pytest.raises(InputError) as caught:
        import_files([str(path)], str(tmp_path / "t.trace"), False, facts)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t.trace").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"n_experts": 8}', 'field "n_experts" is unknown'),
        ('{"n_expert": 8, "n_expert": 9}', 'field "n_expert" is there twice'),
        ('{"expert_bytes": 8, "entry_bytes": 9}', "the same as 'expert_bytes'"),
        ('{"n_expert": true}', "field 'n_expert': true, must be a whole number from 1 to 65535"),
        ('{"moe_layers": "4-2"}', "field 'moe_layers': \"4-2\", must be layer numbers that go up"),
        ("[", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("7", "not a JSON object"),
        ('{"weight_rule": {"scale": 0}}', "field 'weight_rule': scale is 0"),
    ],
)
def test_a_sidecar_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(InputError) as caught:
        load(tmp_path, ("ids.npy", npy_bytes(RUN["ids"])), **FACTS)
    assert f"{tmp_path}/ids.json" in str(caught.value)
    assert message in str(caught.value)


def test_facts_are_not_for_route_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from route_files import route_lines, write_lines

    path = write_lines(tmp_path / "r.csv", route_lines())
    assert main(["import", str(path), "--out", str(tmp_path / "t"), "--n-expert", "8"]) == 2
    assert "--n-expert: model facts are for arrays and tables" in capsys.readouterr().err
    npz = write(tmp_path, files_of(RUN)["npz"])
    assert main(["import", str(path), str(npz), "--out", str(tmp_path / "t")]) == 2
    assert f"{npz}: another kind of file than {path}, a route trace" in capsys.readouterr().err


def test_without_safetensors_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match="needs safetensors; install simlab with its extra 'arrays'"):
        load(tmp_path, ("a.safetensors", b"x"), **SCORED)


def test_an_array_that_claims_more_than_the_file_holds(tmp_path: Path) -> None:
    huge = npy_bytes(RUN["ids"]).replace(b"(7, 3, 2), }", b"(7,2**9,9)}")
    assert huge != npy_bytes(RUN["ids"])
    with pytest.raises(InputError, match="not a readable npy array"):
        load(tmp_path, ("ids.npy", huge), **FACTS)
    huge = npy_bytes(RUN["ids"]).replace(b"(7, 3, 2), }", b"(9, 999999)}")
    with pytest.raises(InputError, match="cut short, 168 of"):
        load(tmp_path, ("ids.npy", huge), **FACTS)


@pytest.mark.parametrize(
    "shape",
    [
        (0, 1 << 64, 2),
        (0, 1 << 62, 1 << 62),
        (1 << 70, 3, 2),
        (0, 3, -2),
        (True, 3, 2),
        (1,) * 200,
        (10**3000, 10**3000),
    ],
)
def test_a_shape_that_no_array_has(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Found by the search (an axis of 0 beside one above 2^63): NumPy's own error, with a traceback."""
    data = npy_bytes(RUN["ids"])
    text = repr({"descr": "<i4", "fortran_order": False, "shape": shape}).encode() + b"\n"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    with pytest.raises(InputError, match=r"ids\.npy: shape \[.* is impossible") as caught:
        load(tmp_path, ("ids.npy", header + data[128:]), **FACTS)
    assert len(str(caught.value)) < 500


def test_a_parquet_null_is_refused(tmp_path: Path) -> None:
    frame = pl.DataFrame(slot_rows(RUN)).with_columns(
        pl.when(pl.col("token") == 3).then(None).otherwise(pl.col("expert")).alias("expert")
    )
    frame.write_parquet(tmp_path / "run.parquet")
    with pytest.raises(InputError, match="row 18, column 'expert': is null"):
        import_files([str(tmp_path / "run.parquet")], str(tmp_path / "t.trace"), False, FACTS)


def test_a_damaged_parquet_writes_nothing_but_its_refusal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Polars tells of a panic on file descriptor 2, in many lines."""
    data = files_without_scores(RUN)["parquet slots"][1]
    path = tmp_path / "run.parquet"
    refused = 0
    for at in range(4, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        words = ["--n-expert", "8", "--expert-bytes", "9", "--prefill", "3", "--force"]
        status = main(["import", str(path), "--out", str(tmp_path / "t.trace"), *words])
        lines = [line for line in capfd.readouterr().err.splitlines() if "warning" not in line]
        assert len(lines) == (status == 2), lines
        refused += status == 2
    assert refused > 10


def test_a_parquet_that_ends_its_reader_is_refused(tmp_path: Path) -> None:
    """Found by the search."""
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"run\.parquet: not a readable parquet file: its pages are damaged"
        ):
            load(tmp_path, ("run.parquet", ENDS_THE_READER), **FACTS)
    # And the next file is read.
    assert load(tmp_path, files_without_scores(RUN)["parquet slots"], **FACTS).n_rows == 21


def test_a_reader_that_does_not_start_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_probe, "_child", None)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(
        RunError, match="the process that reads parquet files first ended at once; is /bin/true"
    ):
        load(tmp_path, files_without_scores(RUN)["parquet slots"], **FACTS)
