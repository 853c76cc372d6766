"""What an artefact is of: digests, words, and every place where two artefacts are paired (docs/trust.md)."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path

import polars as pl
import pytest
from live import TEXT, THREADS, cell_of
from route_files import route_lines

pytest.importorskip("gguf")

import gguf

from simlab.cells import build_cells
from simlab.cli.fidelity import keep_folder
from simlab.cli.main import main
from simlab.cli.output import cell_to_json, cells_to_frame
from simlab.errors import InputError, RunError, SimlabWarning
from simlab.judge.fidelity.runs import RunStore
from simlab.judge.quality.law import QualityModel
from simlab.judge.scores.ppl import Text
from simlab.judge.scores.scoring import Engines, Results, fingerprint
from simlab.judge.validate import check_live, compare_with_recording
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.gguf import read_gguf
from simlab.replay.run import sweep
from simlab.replay.training import load_training
from simlab.trace.header import read_header
from simlab.trace.importer import import_files
from simlab.trace.provenance import (
    OF_RUN,
    OF_TRACE,
    budget_words,
    check,
    differing,
    policy_words,
)
from simlab.trace.store import Trace, open_trace
from simlab.types import Provenance, ResolvedBudget

ROOT = Path(__file__).parent.parent
ORIGINAL, MARGIN = ROOT / "traces" / "original.trace", ROOT / "traces" / "margin-0.15.trace"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """The embedded model with one tensor scaled by 1.01, under the same file name."""
    path = tmp_path_factory.mktemp("tuned") / EMBEDDED_MODEL.name
    shutil.copy(EMBEDDED_MODEL, path)
    scale(path, "blk.7.ffn_down_exps.weight")
    return path


def scale(path: Path, name: str) -> None:
    """Scale a Q8_0 tensor in place: every block of 34 bytes begins with its float16 scale."""
    reader = gguf.GGUFReader(path, "r+")
    blocks = next(t for t in reader.tensors if t.name == name).data.reshape(-1, 34)
    scales = blocks[:, :2].copy().view("float16")
    blocks[:, :2] = (scales.astype("float32") * 1.01).astype("float16").view("uint8")
    reader.data.flush()


def altered(trace: Trace, **fields) -> Trace:
    return dataclasses.replace(trace, header=dataclasses.replace(trace.header, **fields))


# -- digests and words ---------------------------------------------------------------------------------------


def test_a_model_is_known_by_what_it_holds_and_not_by_its_name(tuned, tmp_path):
    own = read_gguf(EMBEDDED_MODEL).digest()
    renamed = tmp_path / "another-name.gguf"
    shutil.copy(EMBEDDED_MODEL, renamed)
    assert read_gguf(renamed).digest() == own
    assert read_gguf(tuned).digest() != own
    # One letter of the metadata.
    content = renamed.read_bytes()
    at = content.index(b"qwen3moe.context_length") + len(b"qwen3moe.context_length") + 4
    renamed.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert read_gguf(renamed).digest() != own


def test_policies_in_words(tmp_path):
    def words(budget="2cycles", **options):
        return policy_words(build_cells(budgets=[budget], **options)[0])

    assert words() == "original v1 | lru v1 | global"
    assert words(margins=["0.15"]) == "substitute v1 L=0.15 | lru v1 | global"
    # A margin or a drop of zero is the router's own routing.
    assert words(margins=["0"], drops=["0"]) == words()
    assert words(evicts=["lfu_decay:half_life=64"], scope="per_layer").endswith(
        "| lfu_decay v1 half_life=64.0 | per_layer"
    )
    user = tmp_path / "keep.py"
    user.write_text(
        "from simlab.policy import eviction\n\n@eviction()\ndef keep(xp, state, last_position, batch, knobs):\n"
        "    return last_position\n"
    )
    before = words(evicts=[str(user)])
    assert before.split(" | ")[1].startswith("keep sha256:")
    user.write_text(user.read_text().replace("return last_position", "return -last_position"))
    assert words(evicts=[str(user)]) != before


def test_budgets_in_words():
    assert budget_words(ResolvedBudget(300, (150, 150), per_layer=False)) == "300 bytes"
    assert budget_words(ResolvedBudget(300, (150, 150), per_layer=True)) == "150 bytes per layer"
    assert budget_words(ResolvedBudget(300, (100, 200), per_layer=True)) == "[100, 200] bytes per layer"
    assert budget_words(ResolvedBudget(0, (0, 0), per_layer=False, off=True)) == "off"


def test_what_differs_is_named_and_what_is_not_known_is_said_once():
    a = Provenance("m1", "t", "original v1", "8 bytes", simlab="1")
    b = Provenance("m2", "t", "original v1", "9 bytes", simlab="2")
    assert differing(a, b, OF_RUN) == ["model", "budget"]
    with pytest.raises(
        InputError, match=r"^x\.json: is not of this run \(model m1, not m2; budget 8 bytes, not 9"
    ):
        check(a, b, OF_RUN, "x.json", "this run", "name another file")
    check(a, dataclasses.replace(a, simlab="3"), OF_RUN, "x", "y", "z")
    with pytest.warns(
        SimlabWarning, match=r"x: whether it is of y is not known.* without its model, text$"
    ) as found:
        check(None, Provenance("m", "t"), OF_TRACE, "x", "y", "z")
    assert len(found) == 1


def test_an_import_is_known_by_its_files(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.csv").write_text("\n".join(route_lines(seed=seed)))
    made = [read_header(import_files([str(tmp_path / f)], str(tmp_path / t))).header.provenance
            for f, t in (("a.csv", "1"), ("a.csv", "2"), ("b.csv", "3"))]  # fmt: skip
    assert made[0] == made[1] != made[2]
    assert made[0] is not None
    assert made[0].model is made[0].policy is None


# -- pairs ---------------------------------------------------------------------------------------------------


def test_validate_refuses_another_model_and_takes_a_renamed_one(tuned, tmp_path, capsys):
    assert main(["validate", str(ORIGINAL), str(tuned), "--budget", "2cycles", "--margin", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"is not of the model {tuned} (model " in said
    renamed = tmp_path / "renamed.gguf"
    shutil.copy(EMBEDDED_MODEL, renamed)
    check_live(open_trace(ORIGINAL), renamed)
    older = altered(open_trace(ORIGINAL), provenance=None)
    with pytest.warns(SimlabWarning, match="an older simlab") as found:
        check_live(older, tuned)
    assert len(found) == 1


def test_a_live_run_of_the_recorded_setting_has_the_recorded_ids():
    trace = open_trace(ORIGINAL)
    assert compare_with_recording(trace, trace) is None
    ids = trace.routing.select("experts").collect()["experts"].to_numpy().copy()
    ids[100] = ids[100][::-1].copy()  # eight of the slots of one row, none in its place
    changed = dataclasses.replace(
        trace, routing=trace.routing.with_columns(pl.Series("experts", ids, pl.Array(pl.Int32, 8)))
    )
    with pytest.raises(RunError, match=r"on the same processor and llama\.cpp"):
        compare_with_recording(trace, changed)
    share = 100 * 8 / (8 * trace.n_rows)
    note = compare_with_recording(trace, altered(changed, cpu="another"))
    assert note is not None
    assert note.startswith(f"the recording ran other experts in {share:.2f} % of slots")
    # Under another setting they may differ.
    assert compare_with_recording(open_trace(MARGIN), changed) is None


def test_kept_recordings_are_of_one_model_and_one_command_at_a_time(tuned, tmp_path):
    text, cell = Text("t", list(TEXT[:14])), cell_of("2cycles")
    folder = tmp_path / "runs"
    with Engines(None, {"n_threads": THREADS}) as engines:
        RunStore(folder, engines).record([text], [cell])
    refused = pytest.raises(InputError, match=r"is not of the run asked for \(model .*--keep")
    with Engines(tuned, {"n_threads": THREADS}) as engines, refused:
        RunStore(folder, engines).record([text], [cell])
    with ExitStack() as one, ExitStack() as other:
        keep_folder(str(folder), one)
        with pytest.raises(InputError, match=f"--keep {folder}: another command is writing it"):
            keep_folder(str(folder), other)


def test_a_resumed_score_is_of_one_model_policy_and_knobs(tuned, tmp_path):
    path = tmp_path / "r.jsonl"
    cells = build_cells(budgets=["2cycles"], evicts=["lfu_decay:half_life=64"])
    others = build_cells(budgets=["2cycles"], evicts=["lfu_decay:half_life=65"])
    with Engines(None, {"n_threads": THREADS}) as engines:
        asked = fingerprint("ppl", engines, "digest", cells, {})
        knobs = fingerprint("ppl", engines, "digest", others, {})
        text = fingerprint("ppl", engines, "another", cells, {})
    with Engines(tuned, {"n_threads": THREADS}) as engines:
        model = fingerprint("ppl", engines, "digest", cells, {})
    with (
        Results(path, asked),
        pytest.raises(InputError, match=f"--resume {path}: another command is writing it"),
    ):
        Results(path, asked)
    Results(path, json.loads(json.dumps(asked))).__exit__()
    for field, wanted in (
        ("policy", knobs),
        ("text", text),
        ("model", model),
        ("settings", asked | {"provenance": []}),
    ):
        with pytest.raises(InputError, match=rf"holds results of another run \({field} differ\)"):
            Results(path, wanted)


LAW = QualityModel("mass^2", {"mass^2": 0.1}, [[0.01]], 0.1, (0.0, 0.5, 1e-3), 3, Provenance("m1"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("coefficients", {"mass^2": -0.1}),
        ("coefficients", {"mass^2": 1e999}),
        ("covariance", [[-1.0]]),
        ("relative_spread", -0.5),
        ("noise", [0.0, 0.5, 0.0]),
        ("calibrated_on", 0),
    ],
)
def test_a_calibration_holds_what_a_fit_gives(tmp_path, field, value):
    path = tmp_path / "law.json"
    LAW.save(path)
    assert QualityModel.load(path).provenance == Provenance("m1")
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(InputError, match=f"field '{field}': holds what no fit gives|not JSON"):
        QualityModel.load(path)
    path.write_text(path.read_text().replace("3", "NaN", 1))
    with pytest.raises(InputError, match=r"not JSON|no fit gives"):
        QualityModel.load(path)


def test_pick_refuses_the_calibration_of_another_model(tmp_path, capsys):
    path = tmp_path / "law.json"
    LAW.save(path)
    words = ["pick", str(ORIGINAL), "--pareto", "--margin", "0,.1", "--calibration", str(path)]
    assert main(words) == 2
    assert "law.json: is not of the model of" in capsys.readouterr().err


def test_a_report_refuses_tables_of_another_trace(tmp_path, capsys):
    cells = build_cells(budgets=["2cycles"], margins=["0", "0.1"])
    numbers = sweep(open_trace(MARGIN), cells)
    cells_to_frame(numbers).write_parquet(tmp_path / "s.parquet")
    words = [
        "report",
        str(ORIGINAL),
        "--sweep",
        str(tmp_path / "s.parquet"),
        "--out",
        str(tmp_path / "r.html"),
    ]
    assert main(words) == 2
    assert (
        "(setting recorded under substitute v1 L=0.15 | lru v1 | global | 3342336 bytes, not original v1"
        in (capsys.readouterr().err)
    )
    live = json.loads((ROOT / "traces" / "original.validate.json").read_text())
    for cell in live:
        cell["provenance"]["model"] = "another"
    (tmp_path / "live.json").write_text(json.dumps(live))
    words[2:4] = ["--validate", str(tmp_path / "live.json")]
    assert main(words) == 2
    assert "--validate: a setting: is not of " in capsys.readouterr().err


def test_numbers_say_what_they_are_of():
    trace = open_trace(MARGIN)
    (numbers,) = sweep(trace, [cell_of("1.5cycles")])
    found = cell_to_json(numbers)["provenance"]
    assert found == {
        "model": read_gguf(EMBEDDED_MODEL).digest(),
        "text": trace.header.provenance.text,  # type: ignore[union-attr]
        "policy": "original v1 | lru v1 | global",
        "budget": "2506752 bytes",
        "recorded": "substitute v1 L=0.15 | lru v1 | global | 3342336 bytes",
        "simlab": found["simlab"],
    }


def test_learning_from_a_trace_of_another_model_is_refused(tmp_path):
    shutil.copytree(ORIGINAL, tmp_path / "t.trace")
    header = json.loads((tmp_path / "t.trace" / "header.json").read_text())
    header["provenance"]["model"] = "another"
    (tmp_path / "t.trace" / "header.json").write_text(json.dumps(header))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            InputError, match=r"--train .*t\.trace: is not of the model .*model another, not "
        ):
            load_training(str(tmp_path / "t.trace"), open_trace(ORIGINAL).header)


def test_a_model_rewritten_while_it_records_leaves_the_trace_unfinished(tmp_path):
    model = tmp_path / "m.gguf"
    shutil.copy(EMBEDDED_MODEL, model)
    with Engine(model, n_threads=THREADS) as engine:
        tokens = engine.tokenize(TEXT[:14])
        with pytest.raises(RunError, match=r"m\.gguf: was written to while it ran"):
            engine.record_text(
                tokens,
                cell_of("2cycles"),
                tmp_path / "t.trace",
                progress=lambda share: scale(model, "blk.0.attn_q.weight") if share == 1 else None,
            )
    assert not read_header(tmp_path / "t.trace").header.complete
