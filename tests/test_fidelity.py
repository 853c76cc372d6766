"""How far replays are off: counts by hand, errors against formulas, blends event by event, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.fidelity.errors import COUNTED, Counts, counts_of_recording, counts_of_replays, errors
from simlab.judge.fidelity.runs import read_texts
from simlab.judge.fidelity.trace_set import STEPS, Place, open_set
from simlab.judge.measure import measure
from simlab.judge.quality.features import features_of
from simlab.judge.quality.law import QualityModel, losses_of, recorded_cell
from simlab.judge.scores.scoring import Engines
from simlab.judge.stats import block_bootstrap_mean, block_bootstrap_of
from simlab.replay.run import replay
from simlab.trace.blend import ENGINE, blend, check_same_events
from simlab.trace.store import TraceWriter, open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"


@pytest.fixture(scope="module")
def recordings():
    return [open_trace(TRACES / f"{name}.trace") for name in ("original", "margin-0.15")]


def cells_of(*routes: str, budget: str = "2cycles"):
    return build_cells(budgets=[budget], routes=list(routes))


# -- counts and errors ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_counts_of_a_recording_are_those_of_its_own_replay():
    for name in ("margin-0.15", "drop-0.75"):
        trace = open_trace(TRACES / f"{name}.trace")
        (replayed,) = counts_of_replays(trace, [recorded_cell(trace.header)])
        recorded = counts_of_recording(trace)
        for of in COUNTED:
            np.testing.assert_array_equal(replayed.of[of], recorded.of[of], err_msg=f"{name} {of}")
        numbers = measure(trace, recorded_cell(trace.header)).decode
        assert [int(recorded.of[of].sum()) for of in ("misses", "substituted", "dropped")] == [
            numbers.misses,
            numbers.substituted,
            numbers.dropped,
        ]


def made(**of: list[list[int]]) -> Counts:
    """Counts of a few tokens in two layers; what is not given is 0."""
    shape = np.array(next(iter(of.values()))).shape
    return Counts({n: np.array(of.get(n, np.zeros(shape)), dtype=np.int64) for n in COUNTED})


def test_errors_by_hand():
    live = made(lookups=[[4, 4], [4, 4]], misses=[[2, 1], [1, 0]], read_bytes=[[20, 10], [10, 0]],
                slots=[[4, 4], [4, 4]], substituted=[[1, 0], [0, 1]])  # fmt: skip
    replay = made(lookups=[[4, 4], [4, 4]], misses=[[2, 2], [1, 1]], read_bytes=[[20, 20], [10, 10]],
                  slots=[[4, 4], [4, 4]], substituted=[[0, 0], [0, 1]])  # fmt: skip
    found = errors([replay], [live], paired=True)
    assert found.miss_rate[:3] == pytest.approx((100 * 6 / 16, 100 * 4 / 16, 12.5))
    assert found.mib_per_token[:3] == pytest.approx((30 / 2**20, 20 / 2**20, 50.0))
    assert found.substituted[:3] == pytest.approx((100 / 16, 200 / 16, -100 / 16))
    assert found.dropped[:3] == (0.0, 0.0, 0.0)
    # The second layer alone: 3 misses of 8 against 1.
    layer = errors([replay.part(layer=1)], [live.part(layer=1)], paired=True)
    assert layer.miss_rate.error == pytest.approx(25.0)
    # Two texts weigh by their tokens, not one by one.
    twice = errors([replay, replay.part(slice(0, 1))], [live, live.part(slice(0, 1))], paired=True)
    assert twice.miss_rate.error == pytest.approx(100 * (6 + 4 - 4 - 3) / 24)


def test_what_is_paired_is_known_far_better_than_what_is_not():
    generator = np.random.default_rng(0)
    misses = generator.integers(0, 9, size=(400, 2))
    of = {name: np.full((400, 2), 8) for name in ("lookups", "slots")}
    zeros = {name: np.zeros((400, 2), np.int64) for name in ("substituted", "dropped")}
    live = Counts({**of, **zeros, "misses": misses, "read_bytes": misses * 10})
    more = np.minimum(misses + (generator.random((400, 2)) < 0.05), 8)
    replay = Counts({**of, **zeros, "misses": more, "read_bytes": more * 10})
    paired, apart = (errors([replay], [live], paired=p).miss_rate for p in (True, False))
    assert paired.error == apart.error
    assert paired.interval.low <= paired.error <= paired.interval.high
    assert paired.interval.high - paired.interval.low < 0.4 * (apart.interval.high - apart.interval.low)


def test_unlike_runs_are_refused():
    counts = made(slots=[[1, 1], [1, 1]])
    with pytest.raises(InputError, match="1 tokens beside a live run of 2"):
        errors([counts.part(slice(0, 1))], [counts], paired=True)


def test_a_bootstrap_of_a_ratio_holds_it_and_draws_the_same_blocks():
    generator = np.random.default_rng(3)
    under = generator.uniform(1, 2, 640)
    (ratio,) = block_bootstrap_of([[3 * under], [under]], lambda a, b: np.stack([a / b]))
    assert ratio == pytest.approx((3.0, 3.0))
    (apart,) = block_bootstrap_of([[3 * under], [under]], lambda a, b: np.stack([a / b]), drawn=(0, 1))
    assert apart.low < 3 < apart.high
    texts = [under[:200], under[200:]]
    means = block_bootstrap_of([texts, texts], lambda a, b: np.stack([a, b, a - b]))
    assert means[0] == means[1] == pytest.approx(block_bootstrap_mean(texts))
    assert means[2] == (0.0, 0.0)
    assert math.isnan(block_bootstrap_of([[np.ones(1)]], lambda a: np.stack([a]))[0].low)


# -- blends -----------------------------------------------------------------------------------------------


def arrays(trace, name: str) -> np.ndarray:
    column = trace.routing.select(name).collect()[name].to_numpy()
    return column.reshape(len(column), -1)


def test_a_blend_lies_between_its_recordings_event_by_event(recordings, tmp_path):
    mixed = blend(recordings, [0.25, 0.75], tmp_path / "mixed.trace")
    assert (mixed.header.engine, mixed.header.route) == (ENGINE, None)
    p, q, found = (arrays(t, "scores").astype(np.float64) for t in (*recordings, mixed))
    # A softmax of blended logits is the weighted geometric mean, made to add up to 1.
    geometric = p**0.25 * q**0.75
    expected = geometric / geometric.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    # The router's picks are the best of those scores, heaviest first, and their weights add up to one.
    best = np.argsort(-arrays(mixed, "scores"), axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(arrays(mixed, "router_experts"), best)
    np.testing.assert_allclose(arrays(mixed, "weights").sum(axis=1), 1, rtol=1e-5)
    assert mixed.tokens.collect()["token"].equals(recordings[0].tokens.collect()["token"])
    assert mixed.tokens.collect()["wall_ns"].null_count() == mixed.tokens.collect().height


@pytest.mark.slow
def test_all_of_one_recording_replays_as_that_recording_does(recordings, tmp_path):
    (cell,) = cells_of("substitute:L=0.1")
    alone = blend(recordings, [1.0, 0.0], tmp_path / "alone.trace")
    a, b = replay(alone, cell).decode, replay(recordings[0], cell).decode
    # Rounding the softmax once more may turn a tie in some thousand events.
    assert a.misses == pytest.approx(b.misses, rel=2e-3)
    assert a.substituted == pytest.approx(b.substituted, rel=2e-2)


def test_only_recordings_of_the_same_tokens_blend(recordings, tmp_path):
    trace = recordings[0]
    with TraceWriter(tmp_path / "short.trace", trace.header, trace.width) as writer:
        for table in ("routing", "tokens"):
            rows = getattr(trace, table).filter(pl.col("graph") < 20).collect()
            writer.add(table, {name: rows[name] for name in rows.columns})
    with pytest.raises(InputError, match="same tokens"):
        check_same_events([trace, open_trace(tmp_path / "short.trace")])
    with TraceWriter(tmp_path / "blank.trace", trace.header, trace.width) as writer:
        for table in ("routing", "tokens"):
            rows = getattr(trace, table).collect().drop("scores", strict=False)
            writer.add(table, {name: rows[name] for name in rows.columns})
    with pytest.raises(InputError, match="scores"):
        check_same_events([trace, open_trace(tmp_path / "blank.trace")])


# -- sets -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cell_takes_its_scores_from_where_it_strays_as_far(recordings):
    with open_set(recordings[::-1]) as traces:
        first, last = traces.strays
        assert [t.path.name for t in traces.traces] == ["original.trace", "margin-0.15.trace"]
        assert first == 0.0 < last
        assert traces.place(-1.0) == traces.place(0.0) == Place(0, 0)
        assert traces.place(last) == traces.place(2 * last) == Place(1, 0)
        assert traces.place(last / 2) == Place(0, STEPS // 2)
        assert traces.place(0.99 * last) == Place(1, 0)
        cells = cells_of("substitute:L=0", "substitute:L=0.15", "substitute:L=0.07")
        original, own, between = traces.replay(cells)
        places = traces.places(cells)
    assert original.decode == replay(recordings[0], cells[0]).decode
    # The recorded margin replayed on its own recording is the recording.
    assert own.decode.misses == measure(recordings[1], cells[1]).decode.misses
    assert places[2].below == 0
    assert 0 < places[2].step < STEPS
    assert original.decode.misses > between.decode.misses > own.decode.misses


def test_a_set_of_one_is_refused(recordings):
    with pytest.raises(InputError, match="at least two"), open_set(recordings[:1]):
        pass


def test_the_replay_command_takes_a_set(capsys):
    words = [str(TRACES / f"{name}.trace") for name in ("original", "margin-0.15")]
    assert main(["replay", *words, "--margin", "0.07", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert "of the way from original.trace to margin-0.15.trace" in numbers["note"]
    assert main(["replay", words[0], "--margin", "0.07", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert "note" not in alone
    assert alone["decode"]["slots"] == numbers["decode"]["slots"]


# -- the grid, live ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder of recordings that the live tests share, and two short texts."""
    pytest.importorskip(
        "llama_cpp", reason="the live engine's extra is not installed: pip install 'simlab[engine]'"
    )
    folder = tmp_path_factory.mktemp("grid")
    data = Path(__file__).resolve().parent.parent / "simlab" / "data"
    texts = []
    for name in ("text-b", "text-c"):
        texts.append(folder / f"{name}.txt")
        texts[-1].write_bytes((data / f"{name}.txt").read_bytes()[:120])
    return folder, [str(t) for t in texts]


@pytest.mark.slow
def test_the_fidelity_command_sets_replays_beside_live_runs(kept, capsys):
    folder, texts = kept
    words = ["fidelity", "--text", *texts, "--tokens", "96", "--budget", "2cycles", "--margin", "0,.2", "--buffered",
             "--recorded", "substitute:L=.6@2cycles", "--keep", str(folder / "runs")]  # fmt: skip
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    whole = {(r["compared"], r["margin"]): r for r in rows if r["text"] is None and r["part"] == "all"}
    assert set(whole) == {("L1-L2", 0.0), ("L1-L2", 0.2), ("set-L2", 0.0), ("set-L2", 0.2)}
    # The original routing replays to the last miss, on one recording and on a set.
    for compared in ("L1-L2", "set-L2"):
        exact = whole[compared, 0.0]
        assert [exact[n]["error"] for n in ("miss_rate_points", "substituted_points", "dropped_points")] == [
            0,
            0,
            0,
        ]
    off = whole["L1-L2", 0.2]
    assert off["substituted_points"]["replay"] > 20
    for name in ("miss_rate_points", "mib_per_token_percent", "substituted_points"):
        low, high = off[name]["interval"]
        assert low <= off[name]["error"] <= high
    # By text and by layer the same slots are counted: errors of layers average to that of the whole.
    layers = [r["miss_rate_points"]["error"] for r in rows if r["part"].startswith("layer") and r["margin"] == 0.2
              and r["compared"] == "L1-L2"]  # fmt: skip
    assert len(layers) == 8
    assert np.mean(layers) == pytest.approx(off["miss_rate_points"]["error"], abs=1e-9)
    by_text = [r for r in rows if r["text"] is not None and r["margin"] == 0.2 and r["compared"] == "L1-L2"]
    assert [r["text"] for r in by_text] == ["text-b", "text-c"]
    assert sum(r["part"].startswith("tokens") for r in rows) == 4 * len(whole)
    # What is kept is not run again, and a run of something else is refused.
    before = {p: p.stat().st_mtime_ns for p in (folder / "runs").rglob("*.parquet")}
    assert main([*words, "--by", "layer"]) == 0
    said = capsys.readouterr().out
    assert "L1: a replay" in said
    assert said.count("layer 7") == len(whole)
    assert {p: p.stat().st_mtime_ns for p in (folder / "runs").rglob("*.parquet")} == before
    words[words.index("96")] = "90"
    assert main(words) == 2
    assert "is not of the run asked for (text " in capsys.readouterr().err


def test_each_file_is_cut_as_often_as_is_asked(kept):
    _, paths = kept
    with Engines(None, {"buffered": True}) as engines:
        whole = read_texts(engines, paths, 96)
        texts = read_texts(engines, paths, 30, (1, 4))
    assert [text.name for text in texts] == ["text-b", *(f"text-c-{i}" for i in range(1, 5))]
    assert texts[0].tokens == whole[0].tokens[:30]
    assert [token for text in texts[1:4] for token in text.tokens] == whole[1].tokens[:90]


@pytest.mark.slow
def test_what_the_model_writes_is_set_beside_the_replay_of_what_it_wrote(kept, capsys):
    folder, texts = kept
    words = ["fidelity", "--text", texts[0], "--tokens", "96", "--budget", "2cycles", "--margin", "0,.2", "--buffered",
             "--free", "--again", "--keep", str(folder / "runs"), "--json"]  # fmt: skip
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    again = {
        r["margin"]: r for r in rows if r["compared"] == "L2-L2" and r["text"] is None and r["part"] == "all"
    }
    # The second live run is of the same tokens but the first, so it is another run, and nearly the same one.
    first, second = (
        open_trace(next((folder / "runs" / "text-b").glob(f"2cycles_substitute-L=0_lru_global{how}.trace")))
        for how in ("", "_again")
    )
    assert first.header.text_hash != second.header.text_hash
    assert losses_of(first)["next_token"].equals(losses_of(second)["next_token"])
    losses, others = (losses_of(t)["nll"].to_numpy() for t in (first, second))
    assert not np.array_equal(losses, others)
    assert np.median(np.abs(losses - others)) < 0.1
    assert all(abs(again[m]["miss_rate_points"]["error"]) < 5 for m in (0.0, 0.2))
    free = {
        r["margin"]: r for r in rows if r["compared"] == "L1-L3" and r["text"] is None and r["part"] == "all"
    }
    assert free[0.0]["miss_rate_points"]["error"] == 0.0
    low, high = free[0.2]["miss_rate_points"]["interval"]
    forced = next(r for r in rows if r["compared"] == "L1-L2" and r["margin"] == 0.2 and r["text"] is None)
    assert high - low > forced["miss_rate_points"]["interval"][1] - forced["miss_rate_points"]["interval"][0]
    # 96 tokens less a prompt of 64.
    trace = open_trace(next((folder / "runs" / "text-b").glob("*L=0.2*free.trace")))
    assert counts_of_recording(trace).n_tokens == 32


@pytest.mark.slow
def test_the_quality_command_fits_judges_and_keeps_a_law(kept, capsys):
    folder, texts = kept
    law = folder / "law.json"
    words = ["quality", "--text", *texts, "--tokens", "96", "--budget", "2cycles", "--margin", ".2,.6,.8", "--buffered",
             "--calibrate", ".6,.8", "--keep", str(folder / "runs"), "--out", str(law)]  # fmt: skip
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["law"]["calibrated_on"] == 4
    assert [of["text"] for of in found["by_text"]] == ["text-b", "text-c"]
    assert found["if_true"]["median_interval"][0] <= found["if_true"]["median"]
    assert {v["judged_on"] for v in found["verdicts"]} == {"margins", "margins left out"}
    assert len(found["runs"]) == 6 * len({v["form"] for v in found["verdicts"]})
    model = QualityModel.load(law)
    trace = open_trace(next((folder / "runs" / "text-b").glob("*original_lru_global.trace")))
    little, much = model.predict(features_of(trace, cells_of("substitute:L=0.2", "substitute:L=0.6")))
    assert 0 <= little.delta_nll < much.delta_nll
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert "law, simulated: undecided distance + undecided distance^2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recorded", "substitute:L=.3"], "has no budget; write substitute:L=.3@2cycles"),
        (["--stretches", "900"], "ask for fewer"),
        (["--stretches", "1,2"], "2 numbers for 1 files"),
        (["--text", "nowhere.txt"], "nowhere.txt: No such file"),
    ],
)
def test_wrong_words_of_the_fidelity_command_end_in_one_line(kept, capsys, words, said):
    _, texts = kept
    assert main(["fidelity", "--text", texts[0], "--margin", ".2", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
