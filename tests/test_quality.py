"""The quality law: its features against a slow reference, fits against known laws, and what it must never do."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.cells import build_cells
from simlab.errors import InputError
from simlab.judge.quality.check import JudgedRun, LiveRun, leave_texts_out, level, perfect, verdict
from simlab.judge.quality.features import FEATURES, UNDECIDED, features_of, features_of_recording
from simlab.judge.quality.law import FORMS, Calibration, QualityModel, calibrate, losses_of, recorded_cell
from simlab.judge.quality.runs import calibrates, without_budget
from simlab.judge.stats import coverage, standard_error
from simlab.replay.run import sweep
from simlab.trace.store import TraceWriter, open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
SHAPE: dict[str, object] = dict.fromkeys(FEATURES, 0.0)


@pytest.fixture(scope="module")
def original():
    return open_trace(TRACES / "original.trace")


# -- features ---------------------------------------------------------------------------------------------


def slow_features(name: str) -> dict[str, float]:
    """Features of a shipped recording, event by event, from its tables and plain Python.

    The router's weights come from the scores, those applied are the recorded ones, with dropping done by hand.
    """
    trace = open_trace(TRACES / f"{name}.trace")
    rows, by_token = trace.routing.collect().to_dicts(), {}
    sums, before = {f: [] for f in FEATURES + UNDECIDED}, {}
    for row in rows:
        p, router = row["scores"], row["router_experts"]
        kept = [
            (e, w) for e, w, d in zip(row["experts"], row["weights"], row["dropped"], strict=True) if not d
        ]
        scale = sum(row["weights"]) / sum(w for _, w in kept)
        applied = {e: w * scale for e, w in kept}
        wanted = {e: p[e] / sum(p[i] for i in router) for e in router}
        last, key = before.get(row["layer"]), row["layer"]
        before[key] = (row["turn"], set(applied), set(router))
        if row["phase"] != 1:
            continue
        moved = [abs(applied.get(e, 0) - wanted.get(e, 0)) for e in applied.keys() | wanted.keys()]
        sums["mass"].append(sum(p[e] for e in router) - sum(p[e] for e in applied))
        sums["distance"].append(sum(moved) ** 2)
        by_token.setdefault((row["turn"], row["step"]), []).append(sum(moved) ** 2)
        sums["energy"].append(sum(m * m for m in moved))
        sums["top1"].append(router[0] not in applied)
        sums["changed"].append(len(set(router) - applied.keys()) / len(router))
        sums["dropped"].append(sum(row["dropped"]) / len(row["dropped"]))
        if last is not None and last[0] == row["turn"]:
            sums["kept"].append(len(applied.keys() & last[1]) / len(applied))
            sums["kept_router"].append(len(set(router) & last[2]) / len(router))
    for token in trace.tokens.collect().to_dicts():
        if token["nll"] is not None and token["phase"] == 1:
            p, distances = math.exp(-token["nll"]), by_token[token["turn"], token["step"]]
            for power, feature in enumerate(UNDECIDED):
                sums[feature].append(p * (1 - p) * (sum(distances) / len(distances)) ** power)
    return {f: sum(values) / len(values) for f, values in sums.items()}


@pytest.mark.parametrize("name", ["margin-0.15", "drop-0.75"])
def test_features_are_those_of_the_slow_reference(name):
    trace = open_trace(TRACES / f"{name}.trace")
    found = features_of_recording(trace, recorded_cell(trace.header)).row(0, named=True)
    assert found["tokens"] == 247
    for feature, value in slow_features(name).items():
        assert found[feature] == pytest.approx(value, rel=1e-5, abs=1e-9), feature
    for feature in FEATURES:
        assert np.mean(found[f"{feature}_by_layer"]) == pytest.approx(found[feature], rel=1e-6, abs=1e-12), (
            feature
        )


@pytest.mark.slow
def test_features_of_a_replay_are_those_of_the_run_it_replays_and_of_its_numbers(original):
    cells = build_cells(budgets=["2cycles"], margins=["0", "0.15"])
    found = features_of(original, cells)
    numbers = sweep(original, cells)
    for row, cell_numbers in zip(found.iter_rows(named=True), numbers, strict=True):
        d = cell_numbers.decode
        assert d.agreement is not None
        assert row["mass"] == pytest.approx(d.mass_displaced, abs=1e-12)
        assert row["changed"] == pytest.approx(1 - d.agreement, abs=1e-12)
        assert row["dropped"] == pytest.approx(d.dropped / d.slots, abs=1e-12)
    assert [found[f][0] for f in FEATURES if not f.startswith("kept")] == [0.0] * 6
    assert [found[f][0] for f in UNDECIDED[1:]] == [0.0] * 2
    assert found["kept"][0] == found["kept_router"][0] == found["kept_router"][1]
    margin = open_trace(TRACES / "margin-0.15.trace")
    own = recorded_cell(margin.header)
    live = features_of_recording(margin, own)
    replayed = features_of(margin, [cells[1]])
    for feature in FEATURES:
        assert replayed[feature][0] == pytest.approx(live[feature][0], abs=1e-9), feature


def test_features_want_the_routers_scores(original, tmp_path):
    with TraceWriter(tmp_path / "blank.trace", original.header, original.width) as writer:
        rows = original.routing.collect().drop("scores")
        writer.add("routing", {name: rows[name] for name in rows.columns})
    with pytest.raises(InputError, match="scores"):
        features_of_recording(open_trace(tmp_path / "blank.trace"), recorded_cell(original.header))


def test_calibration_pairs_the_losses_of_the_same_tokens(original):
    margin = open_trace(TRACES / "margin-0.15.trace")
    (run,) = calibrate(original, [margin], "b")
    a, b = (losses_of(t)["nll"].to_numpy() for t in (original, margin))
    assert run.delta_nll == pytest.approx(b.mean() - a.mean())
    assert run.standard_error == pytest.approx(standard_error([b - a]))
    assert run.features["mass"] == pytest.approx(
        features_of(original, [recorded_cell(margin.header)])["mass"][0]
    )
    (none,) = calibrate(original, [original])
    assert (none.delta_nll, none.standard_error) == (0.0, 0.0)


def test_calibration_refuses_other_tokens(original, tmp_path):
    with TraceWriter(tmp_path / "cut.trace", original.header, original.width) as writer:
        for table in ("routing", "tokens"):
            rows = getattr(original, table).filter(pl.col("graph") < 100).collect()
            writer.add(table, {name: rows[name] for name in rows.columns})
    with pytest.raises(InputError, match="same tokens"):
        calibrate(original, [open_trace(tmp_path / "cut.trace")])


# -- the law ----------------------------------------------------------------------------------------------


def row_of(strays: float, kept: float = 0.5, tokens: int = 2000) -> dict[str, object]:
    """Features of a made-up cell that strays this far, each in keeping with the others."""
    return SHAPE | {
        "mass": 0.2 * strays,
        "distance": 0.8 * strays,
        "energy": 0.15 * strays,
        "top1": 0.3 * strays**2,
        "changed": min(1.0, 0.7 * strays),
        "kept": kept,
        "kept_router": 0.3,
        "distance_by_layer": [0.7 * strays, 0.9 * strays],
        "undecided": 0.07,
        "undecided_distance": 0.07 * 0.9 * strays,
        "undecided_distance^2": 0.07 * (1.1 * strays) ** 2,
        "tokens": tokens,
    }


def made_runs(form: str, coefficients: list[float], noise: float = 0.0, seed: int = 0) -> list[Calibration]:
    """Runs of a known law, with normal noise of standard error `noise` times the rise."""
    generator = np.random.default_rng(seed)
    rows = [row_of(strays, kept) for strays in (0.1, 0.3, 0.6, 1.0) for kept in (0.2, 0.5, 0.8)]
    terms = np.stack(list(FORMS[form](pl.DataFrame(rows)).values()), axis=1)
    rise = terms @ np.array(coefficients[: terms.shape[1]])
    error = np.maximum(noise * rise, 1e-6)
    return [
        Calibration(row, float(d + e * generator.normal()), float(e))
        for row, d, e in zip(rows, rise, error, strict=True)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_law_is_found_again_from_runs_without_noise(form):
    runs = made_runs(form, [0.4, 0.2, 0.3])
    model = QualityModel.fit(runs, form)
    found = model.predict(pl.DataFrame([dict(run.features) for run in runs]))
    assert [p.delta_nll for p in found] == pytest.approx([run.delta_nll for run in runs], rel=1e-2, abs=1e-5)
    assert all(p.low <= p.delta_nll <= p.high for p in found)


@pytest.mark.parametrize("form", FORMS)
def test_a_cell_that_does_not_stray_costs_nothing(form):
    model = QualityModel.fit(made_runs(form, [0.4, 0.2, 0.3], noise=0.1), form)
    (nothing,) = model.predict(pl.DataFrame([row_of(0.0)]))
    assert nothing.delta_nll == 0.0
    assert model.predict(pl.DataFrame()) == []


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=15)
@given(
    delta=st.lists(st.floats(-0.05, 1.0), min_size=6, max_size=6),
    strays=st.tuples(st.floats(0, 1.5), st.floats(0, 1.5)),
)
def test_a_law_never_falls_where_more_strays_whatever_it_was_fitted_on(form, delta, strays):
    rows = [row_of(s, k) for s in (0.2, 0.6, 1.0) for k in (0.3, 0.7)]
    runs = [Calibration(row, d, 0.01) for row, d in zip(rows, delta, strict=True)]
    model = QualityModel.fit(runs, form)
    less, more = model.predict(pl.DataFrame([row_of(s) for s in sorted(strays)]))
    assert 0 <= less.delta_nll <= more.delta_nll + 1e-12
    assert all(c >= 0 for c in model.coefficients.values())


def test_intervals_hold_live_runs_about_as_often_as_they_say():
    form = next(iter(FORMS))
    held = n = 0
    for seed in range(60):
        runs = made_runs(form, [0.4, 0.2, 0.3], noise=0.1, seed=2 * seed)
        model = QualityModel.fit(runs, form)
        fresh = made_runs(form, [0.4, 0.2, 0.3], noise=0.1, seed=2 * seed + 1)
        found = model.predict(pl.DataFrame([dict(run.features) for run in fresh]))
        held += sum(p.low <= run.delta_nll <= p.high for p, run in zip(found, fresh, strict=True))
        n += len(fresh)
    assert 0.85 <= held / n <= 0.99


def test_a_law_that_does_not_fit_says_so_in_its_width():
    form = next(iter(FORMS))
    runs = made_runs(form, [0.4, 0.2, 0.3], noise=0.05)
    shaken = [r._replace(delta_nll=r.delta_nll * (1.5 if i % 2 else 0.5)) for i, r in enumerate(runs)]
    calm, rough = QualityModel.fit(runs, form), QualityModel.fit(shaken, form)
    assert calm.relative_spread < 0.1 < rough.relative_spread


def test_the_error_of_a_law_is_that_at_texts_left_out_by_hand():
    """Two texts of which one rises by 1 and the other by 3 times mass^2: each law of one is 2 off at the other."""
    rises = {"one": 1.0, "other": 3.0}
    runs = [
        # A cell that strays by so much has a fifth of it for mass.
        Calibration(row_of(strays), level * (0.2 * strays) ** 2, 1e-6, text)
        for text, level in rises.items()
        for strays in (0.2, 0.4, 0.6)
    ]
    # Off by 2 / 3 of what is foretold and by 2 times that, three runs each.
    by_hand = float(np.sqrt(((2 / 3) ** 2 + 2**2) / 2))
    assert QualityModel.fit(runs, "mass^2").relative_spread == pytest.approx(by_hand, rel=1e-3)
    of_one = [run._replace(text="one") for run in runs]
    assert QualityModel.fit(of_one, "mass^2").relative_spread < 0.6


def test_a_law_is_kept_as_json(tmp_path):
    model = QualityModel.fit(made_runs(next(iter(FORMS)), [0.4, 0.2, 0.3], noise=0.1), next(iter(FORMS)))
    model.save(tmp_path / "law.json")
    assert QualityModel.load(tmp_path / "law.json") == model
    for text in ("{}", "[1]", json.dumps({"quality_law": 2})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match="not a quality law"):
            QualityModel.load(tmp_path / "bad.json")
    with pytest.raises(InputError, match="no such file"):
        QualityModel.load(tmp_path / "none.json")


def test_what_cannot_be_fitted_is_refused():
    runs = made_runs(next(iter(FORMS)), [0.4, 0.2, 0.3], noise=0.1)
    with pytest.raises(InputError, match="not a quality law; there are"):
        QualityModel.fit(runs, "guess")
    with pytest.raises(InputError, match="at least two"):
        QualityModel.fit(runs[:1])
    with pytest.raises(InputError, match="standard error above zero"):
        QualityModel.fit([*runs, runs[0]._replace(standard_error=0.0)])


# -- judging ----------------------------------------------------------------------------------------------


def made_live(texts: list[str], seed: int = 0) -> list[LiveRun]:
    cells = build_cells(budgets=["1.2cycles", "2cycles"], margins=["0.1", "0.3", "0.6"])
    form = next(iter(FORMS))
    found = []
    for i, text in enumerate(texts):
        runs = made_runs(form, [0.4, 0.2, 0.3], noise=0.05, seed=seed + i)
        found += [LiveRun(c, r._replace(text=text)) for c, r in zip(cells, runs[::2], strict=True)]
    return found


def test_a_text_left_out_has_no_say_in_what_is_foretold_of_it():
    runs = made_live(["b", "c", "d"])
    forms = ("mass^2", next(reversed(FORMS)))
    judged = leave_texts_out(runs, lambda cell: True, forms)
    wild = [LiveRun(r.cell, r.run._replace(delta_nll=9.0)) if r.run.text == "b" else r for r in runs]
    again = leave_texts_out(wild, lambda cell: True, forms)
    of_b, of_b_again, of_c, of_c_again = (
        [j.predicted for j in some if j.text == text] for text in "bc" for some in (judged, again)
    )
    assert of_b == of_b_again
    assert of_c != of_c_again
    with pytest.raises(InputError, match="two or more"):
        leave_texts_out([r for r in runs if r.run.text == "b"], lambda cell: True)


def test_margins_and_budgets_left_out_have_no_say_either():
    runs = made_live(["b", "c"])
    margins = (0.3, 0.6)
    found = without_budget(runs, margins, ["1.2cycles", "2cycles"])
    assert len(found) == len(FORMS) * len(runs)
    assert not any(j.calibrated for j in found)
    wild = [
        LiveRun(r.cell, r.run._replace(delta_nll=9.0)) if r.cell.budget.text == "2cycles" else r for r in runs
    ]
    kept = [j.predicted for j in found if j.cell.budget.text == "2cycles"]
    assert kept == [
        j.predicted
        for j in without_budget(wild, margins, ["1.2cycles", "2cycles"])
        if j.cell.budget.text == "2cycles"
    ]
    cells = [r.cell for r in runs]
    assert [calibrates(c, margins, ["2cycles"]) for c in cells[:6]] == [False] * 4 + [True] * 2
    (both,) = build_cells(budgets=["2cycles"], margins=["0.3"], drops=["0.5"])
    assert not calibrates(both, margins, ["2cycles"])


def test_a_verdict_by_hand():
    (cell,) = build_cells(budgets=["2cycles"], margins=["0.3"])

    def run(error: float, low: float, high: float) -> JudgedRun:
        return JudgedRun("f", "b", cell, True, 1.0, 0.1, 1.0 + 0.1 * error, low, high)

    found = verdict([run(0.5, 0.9, 1.1), run(-2.0, 0.7, 0.9), run(1.0, 0.8, 1.3)])
    assert (found.runs, found.median, found.bias) == (3, pytest.approx(1.0), pytest.approx(0.5))
    assert found.percentile_90 == pytest.approx(1.8)
    assert (found.held.held, found.held.n) == (2, 3)
    # Widths 0.2, 0.2, 0.5; the one that missed, by 0.1, pays 2 / 0.1 of that.
    assert found.held.mean_score == pytest.approx((0.2 + 0.2 + 0.5 + 20 * 0.1) / 3)


def test_the_level_of_a_text_by_hand():
    (cell,) = build_cells(budgets=["2cycles"], margins=["0.3"])
    runs = [
        JudgedRun("f", "b", cell, True, live, error, foretold, 0.0, 1.0)
        for live, error, foretold in ((0.1, 0.1, 0.2), (0.9, 0.2, 0.6))
    ]
    # Weighted least squares through zero: (0.2 x 0.1 / 0.01 + 0.6 x 0.9 / 0.04) / (0.2^2 / 0.01 + 0.6^2 / 0.04).
    assert level(runs) == pytest.approx((2 + 13.5) / (4 + 9))


def test_what_a_true_law_gets_is_a_little_more_than_chance_and_less_on_more_texts():
    form, generator = next(iter(FORMS)), np.random.default_rng(2)

    def runs(n_texts: int, *, alike: bool) -> list[LiveRun]:
        """Runs whose tokens are as lucky as is said of them, each its own or all of a text alike."""
        found = []
        luck = {str(i): generator.normal(size=(512, 6)) for i in range(n_texts)}
        for i, live in enumerate(made_live(list(luck))):
            cell, run = live.cell, live.run
            error = 0.2 * run.delta_nll
            of_run = luck[run.text][:, 0 if alike else i % 6]
            differences = run.delta_nll + error * math.sqrt(512) * of_run
            found.append(LiveRun(cell, run._replace(standard_error=error, differences=differences)))
        return found

    few, many, alike = (
        perfect(runs(n, alike=a), lambda cell: True, form, n_draws=25)
        for n, a in ((2, False), (6, False), (6, True))
    )
    assert 0.6 < many.median < 0.85
    assert many.median < few.median < 1.2
    assert 1.2 < many.percentile_90 < 2.0
    # Runs that share their luck are as good as fewer.
    widths = [p.median_interval.high - p.median_interval.low for p in (many, alike)]
    assert widths[0] < 0.8 * widths[1]


def test_coverage_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="shape"):
        coverage(np.zeros(2), np.ones(2), np.zeros(3), 0.9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        coverage(np.zeros(2), np.ones(2), np.zeros(2), 90)
    nothing = coverage(np.zeros(0), np.zeros(0), np.zeros(0), 0.9)
    assert nothing.n == 0
    assert math.isnan(nothing.mean_score)


def test_the_standard_error_is_that_of_the_mean_and_knows_of_neighbours():
    values = np.random.default_rng(5).normal(size=4000)
    assert standard_error([values], block=1) == pytest.approx(values.std() / math.sqrt(4000), rel=0.05)
    smooth = np.convolve(values, np.full(16, 1 / 16), "valid")
    assert standard_error([smooth], block=64) > 3 * standard_error([smooth], block=1)
    assert math.isnan(standard_error([np.ones(1)]))
