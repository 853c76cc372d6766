"""The gates pass on every model the engine streams, and each fails when what it guards is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "llama_cpp", reason="the live engine's extra is not installed: pip install 'simlab[engine]'"
)

from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge import gates
from simlab.judge.gates import CLAIMS, GateResult, run_gates
from simlab.record import cache, hook, lookahead, views
from simlab.record.engine import EMBEDDED_MODEL
from simlab.record.experts import ExpertMemory
from simlab.record.ggml import Tensor
from simlab.record.gguf import read_gguf
from simlab.record.reads import ReadLanes


def failed(results: list[GateResult]) -> set[str]:
    """Names of the gates that failed."""
    return {r.gate for r in results if r.passed is False}


@pytest.fixture(scope="module")
def embedded() -> dict[str, GateResult]:
    """The embedded model's gates."""
    return {r.gate: r for r in run_gates(n_threads=1)}


def test_every_gate_passes_on_the_embedded_model(embedded: dict[str, GateResult]) -> None:
    assert list(embedded) == list(CLAIMS)
    assert {r.gate for r in embedded.values() if not r.passed} == set()
    for gate, result in embedded.items():
        assert result.counts["lookups"] > 0
        if "differing" in result.counts:
            assert (result.counts["differing"] > 0) == (gate == "SAB")
            # Graphs times the vocabulary.
            assert result.counts["logits"] % 259 == 0
    assert embedded["G8b"].counts["dropped"] == embedded["G8b"].counts["droppable"] > 0
    assert embedded["G8d"].counts["reranked"] == 8 * 8 * 16  # layers x k x decode graphs


def test_one_lane_and_a_prompt_in_chunks_pass_too() -> None:
    told: list[float] = []
    results = run_gates(n_threads=1, lanes=1, n_ubatch=3, n_ctx=64, buffered=True, progress=told.append)
    assert failed(results) == set()
    assert told == sorted(told)
    assert told[-1] == 1


@pytest.mark.slow
def test_the_gates_pass_on_every_layout(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")
    from tiny_models import LAYOUTS, make_model

    for name, layout in LAYOUTS.items():
        results = {r.gate: r for r in run_gates(make_model(tmp_path, name), n_threads=1)}
        assert failed(list(results.values())) == set(), name
        idle = {gate for gate, result in results.items() if result.passed is None}
        # At k = 1 there is nothing to drop, and weights scaled up may all be above 1/k.
        assert idle == ({"G8a", "G8b"} if layout.k == 1 else idle & {"G8b"}), name
        assert not idle or layout.k == 1 or layout.scale > 1, name
        for gate in idle:
            assert results[gate].note.startswith("not applicable: ")


@pytest.mark.slow
def test_with_every_expert_routed_there_is_nothing_to_substitute(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")
    from tiny_models import make_model

    results = {r.gate: r for r in run_gates(make_model(tmp_path, "split", n_expert=4, k=4), n_threads=1)}
    assert {gate for gate, r in results.items() if r.passed is None} >= {"G8d", "G8e"}
    assert results["G8d"].note == "not applicable: all 4 experts are routed, none is left to substitute"


def test_without_what_look_ahead_needs_its_gates_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")
    from tiny_models import make_model

    def refuse(layer: int, _pointer: int) -> np.ndarray:
        raise InputError(f"--prefetch next_gate: the gate of layer {layer} is not float32 in this model")

    one_layer = {r.gate: r for r in run_gates(make_model(tmp_path, "split", n_layer=1), n_threads=1)}
    monkeypatch.setattr(lookahead, "_gate_weights", refuse)
    no_gate = {r.gate: r for r in run_gates(n_threads=1)}
    for results, idle in ((one_layer, {"G5a", "G5b"}), (no_gate, {"G5b"})):
        assert failed(list(results.values())) == set()
        assert {gate for gate in ("G5a", "G5b") if results[gate].passed is None} == idle
    assert one_layer["G5a"].note == "not applicable: one layer has experts, there is none to look ahead to"
    assert no_gate["G5b"].note.endswith("the gate of layer 0 is not float32 in this model")


@pytest.mark.slow
def test_where_nothing_can_be_evicted_its_gates_say_so(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")
    from tiny_models import make_model

    # 1.2 cycles hold all experts where every token routes all, and nearly where it routes 7 of 8.
    for sizes, idle in (
        ({"n_expert": 2, "k": 2}, {"G2", "G7", "G8d", "G8e"}),
        ({"n_expert": 8, "k": 7}, {"G2", "G7"}),
        ({"n_expert": 2, "k": 2, "n_layer": 1}, {"G2", "G7", "S2", "S3", "G5a", "G5b", "G8d", "G8e"}),
    ):
        results = {r.gate: r for r in run_gates(make_model(tmp_path, "split", **sizes), n_threads=1)}
        assert failed(list(results.values())) == set()
        assert {gate for gate, r in results.items() if r.passed is None} == idle
        assert results["G2"].note == "not applicable: a cache of 1.2cycles holds every expert that was routed"
        assert results["G2"].counts["differing"] == 0


def test_a_tie_is_no_fault_of_an_inert_margin(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")
    from tiny_models import make_model

    path = make_model(tmp_path, "split", n_expert=16, k=3)
    data = bytearray(path.read_bytes())
    for place in (p for name, p in read_gguf(path).tensors.items() if name.endswith("ffn_gate_inp.weight")):
        router = np.frombuffer(data, np.float32, 64 * 16, place.offset).reshape(16, 64)
        # Experts come in pairs whose scores differ in their last places only: the third best has a near twin.
        router[1::2] = np.nextafter(router[::2], np.float32(2))
    path.write_bytes(data)
    result = {r.gate: r for r in run_gates(path, n_threads=1)}["G8d"]
    assert result.passed, result.note
    assert result.counts["tied"] > 0
    assert result.counts["substituted"] == 0
    assert result.note == f"{result.counts['tied']} slots tied; logits compared before the first"


# -- sabotage ---------------------------------------------------------------------------------------------


def test_ids_read_without_their_stride_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    strided = views.rows_of

    def packed(tensor: Tensor, columns: int, rows: int, stride: int, dtype: type) -> np.ndarray:
        return strided(tensor, columns, rows, 4 * columns if dtype is np.int32 else stride, dtype)

    monkeypatch.setattr(views, "rows_of", packed)
    results = {r.gate: r for r in run_gates(n_threads=1)}
    assert failed(list(results.values())) == set(CLAIMS)
    # Eight rows of eight ids are all 64 experts of the first row: what is missing in no logit shows in the ids.
    assert results["G1"].note.startswith("misread ")


def test_experts_one_byte_off_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(ExpertMemory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for pointer, *_ in self._originals:
                Tensor.from_address(pointer).data += 1

    monkeypatch.setattr("simlab.record.engine.ExpertMemory", Off)
    assert {"G1", "G6", "S1"} <= failed(run_gates(n_threads=1))


def test_a_cache_that_keeps_what_was_released_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction the cache forgets: it counts a hit on pages that are gone."""
    run_batch = cache.LiveCache.run_batch

    def forgetful(self: cache.LiveCache, *args: Any) -> cache.BatchOutcome:
        outcome = run_batch(self, *args)
        for at, expert in outcome.evicted:
            self.residency(at)[expert] = True
        return outcome

    monkeypatch.setattr(cache.LiveCache, "run_batch", forgetful)
    found = failed(run_gates(n_threads=1))
    assert {"G2", "G7", "S2", "S3"} <= found
    assert not found & {"G1", "G6", "S1"}


def test_reads_one_byte_off_are_caught_where_only_buffered_ones_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = ReadLanes.read

    def shifted(self: ReadLanes, slices: Any) -> Any:
        if not self.direct:
            slices = [s._replace(offset=s.offset + 1) for s in slices]
        return read(self, slices)

    monkeypatch.setattr(ReadLanes, "read", shifted)
    found = failed(run_gates(n_threads=1))
    assert "G6" in found
    assert found <= {"G6", "G7"}


def test_an_entry_resident_before_it_is_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ahead that reads but the first expert of those it then calls resident."""
    settle = lookahead.LookAhead.settle

    def too_many(self: lookahead.LookAhead, at: int) -> Any:
        reads = settle(self, at)
        if reads:
            first = reads[0].slice
            self._cache.insert_speculative(at, [(first.expert + i) % self._cache.n_expert for i in range(9)])
        return reads

    monkeypatch.setattr(lookahead.LookAhead, "settle", too_many)
    results = {r.gate: r for r in run_gates(n_threads=1)}
    assert failed(list(results.values())) == {"G5a", "G5b"}
    assert results["G5a"].note.startswith("differing ")


def test_look_ahead_that_reads_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead.LookAhead, "_issue", lambda *_: None)
    results = {r.gate: r for r in run_gates(n_threads=1)}
    assert failed(list(results.values())) == {"G5a", "G5b"}
    assert results["G5b"].note == "read ahead 0, not above; hits by look-ahead 0, not above"


def test_a_drop_rule_that_spares_a_slot_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from simlab.record.live_route import LiveRoute

    drop = LiveRoute.drop

    def sparing(*args: Any) -> Any:
        found = drop(*args)
        if found is None:
            return None
        # The last dropped slot of every row stays.
        last = found.dropped & (np.cumsum(found.dropped[:, ::-1], axis=1)[:, ::-1] == 1)
        return found._replace(dropped=found.dropped & ~last)

    monkeypatch.setattr(LiveRoute, "drop", sparing)
    results = {r.gate: r for r in run_gates(n_threads=1)}
    assert failed(list(results.values())) == {"G8b"}
    assert results["G8b"].note.startswith("spared ")


def test_a_range_over_masked_scores_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A range over a whole row, -inf included, is infinite and lifts every resident expert to the top."""
    pytest.importorskip("gguf", reason="the gguf package writes the models: pip install 'simlab[dev]'")
    from tiny_models import make_model

    fill = hook.LiveRoute._fill

    def of_all(self: hook.LiveRoute, scores: np.ndarray) -> None:
        fill(self, scores)
        rows = self._stage.rows
        rows.range[0] = rows.value.max() - rows.value.min()

    monkeypatch.setattr(hook.LiveRoute, "_fill", of_all)
    with np.errstate(invalid="ignore"):
        results = {r.gate: r for r in run_gates(make_model(tmp_path, "grouped"), n_threads=1)}
    assert failed(list(results.values())) == {"G8d"}
    assert results["G8d"].counts["substituted"] > 0


def test_policies_that_never_act_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.LiveRoute, "reranks", property(lambda _: False, lambda *_: None), raising=False)
    assert failed(run_gates(n_threads=1)) == {"G8d", "G8e"}


def test_a_comparison_that_sees_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertMemory, "overwrite", lambda *_: None)
    results = run_gates(n_threads=1)
    assert failed(results) == {"SAB"}
    assert results[-1].note == "differing 0, not above"


# -- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gates", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == EMBEDDED_MODEL.name
    assert lines[1].split()[:3] == ["gate", "claim", "result"]
    assert [line.split()[0] for line in lines[2:-1]] == list(CLAIMS)
    assert all("  pass  " in line for line in lines[2:-1])


def test_a_refused_model_is_told_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(b"GGUF but no more")
    assert main(["gates", str(odd), str(EMBEDDED_MODEL), "--threads", "1", "--json"]) == 1
    out, err = capsys.readouterr()
    refused, whole = json.loads(out)
    assert refused["model"] == str(odd)
    assert "not a readable GGUF" in refused["refused"]
    assert refused["gates"] == []
    assert whole["refused"] is None
    assert [gate["passed"] for gate in whole["gates"]] == [True] * len(CLAIMS)
    assert "1 of 2 models failed a gate or were refused" in err


def test_a_failed_gate_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ExpertMemory, "overwrite", lambda *_: None)
    assert main(["gates", "--threads", "1"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL" in out.splitlines()[-2]
    assert "1 of 1 models failed" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [(["nowhere.gguf"], "nowhere.gguf: no such file"), (["--ctx", "9"], "--ctx 9: the gates need 24")],
)
def test_bad_words_are_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gates", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_short_context_and_a_mute_vocabulary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gates.RunError, match="a context of 16 tokens; the gates need 24"):
        run_gates(n_ctx=16, n_threads=1)
    monkeypatch.setattr(gates.Llama, "ends_generation", lambda *_: True)
    with pytest.raises(gates.RunError, match="tokens writes text"):
        run_gates(n_threads=1)


def test_gates_refuse_a_prefetch_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gates", "--prefetch", "next_gate:K=4"]) == 2
    assert "unrecognized arguments: --prefetch" in capsys.readouterr().err
