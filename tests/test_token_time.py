"""The time model of a metrics file: by hand, on runs made with known coefficients, and on a recorded one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from route_files import shared

from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.speed.time_check import GOING, LEAST_TOKENS, check_time
from simlab.judge.speed.token_time import (
    Composition,
    Line,
    TimeModel,
    Timings,
    before,
    fit,
    solve,
    timings_of,
)
from simlab.trace.bmoe_metrics import read_metrics

MIB = 1 << 20


def model(**other) -> TimeModel:
    given = {
        "aim": "mean", "composition": "overlapped", "exposed": Line(-20.0, 0.5), "management": Line(1.0, 0.1),
        "compute": Line(100.0, 0.2), "warm_up": 40.0, "warm_up_tokens": 10.0, "fault_ms": 0.5, "faults": 4.0,
        "warm_up_faults": 6.0, "carry": 0.5, "memory_tokens": 2.0,
    }  # fmt: skip
    return TimeModel(**{**given, **other})


def run(
    n: int = 600,
    seed: int = 0,
    *,
    composition: Composition = "serial",
    offset: float = 5.0,
    noise: float = 0.0,
    faults: bool = False,
    slow: float = 0.0,
) -> Timings:
    """Tokens with: reads offset + 0.4/MiB, management 2 + 0.1/MiB, compute 80 + 0.05/MiB + 60 exp(-age/64)."""
    generator = np.random.default_rng(seed)
    mib, age = generator.uniform(50, 300, n), np.arange(n, dtype=np.float64)
    exposed = np.maximum(0, offset + 0.4 * mib)
    management = 2 + 0.1 * mib
    compute = 80 + 0.05 * mib + 60 * np.exp(-age / 64) + noise * generator.exponential(size=n)
    compute += slow * (age // 50 % 2)
    majflt = generator.poisson(20, n).astype(np.float64) if faults else None
    if majflt is not None:
        compute += 0.25 * majflt
    wall = exposed + management + compute
    return Timings(composition, age, mib, wall, exposed, management, compute, majflt, 0)


def write(path: Path, rows: list[str], heading: str, settings: str = "") -> Path:
    path.write_text(settings + "\n".join([heading, *rows]) + "\n")
    return path


def test_parts_by_hand():
    parts = model().parts(np.array([0.0, 30.0, 100.0]), np.array([0.0, 10.0, 1e9]))
    cold = np.exp(-1)
    np.testing.assert_allclose(parts.compute, [140, 106 + 40 * cold, 120])
    np.testing.assert_allclose(parts.page_faults, [5, 2 + 3 * cold, 2])
    np.testing.assert_allclose(parts.management, [1, 4, 11])
    # 30 MiB hide behind compute: 40 would be the first to show.
    np.testing.assert_allclose(parts.exposed_read, [0, 0, 30])
    total = model().predict(np.array([100.0]), np.array([1e9]))
    np.testing.assert_allclose(total, 120 + 2 + 11 + 30)


def test_no_read_no_wait():
    parts = model(exposed=Line(10.0, 0.5)).parts(np.array([0.0, 2.0]), np.zeros(2))
    np.testing.assert_array_equal(parts.exposed_read, [0, 11])


def test_before_by_hand():
    values, keep = np.array([8.0, 4.0, 100.0]), np.exp(-1 / 2)
    first = (1 - keep) * 8
    np.testing.assert_allclose(before(values, 2), [0, first, keep * first + (1 - keep) * 4])
    assert len(before(np.array([]), 2)) == 0


def test_a_going_run_knows_only_the_past():
    found, timings = model(), run()
    at = 300
    first = found.predict_going(timings.read_mib, timings.age, timings.wall_ms)
    later = timings.wall_ms.copy()
    later[at:] *= 7
    changed = found.predict_going(timings.read_mib, timings.age, later)
    np.testing.assert_array_equal(first[: at + 1], changed[: at + 1])
    assert (first[at + 1 :] != changed[at + 1 :]).all()


@pytest.mark.parametrize("aim", ["mean", "median"])
def test_the_coefficients_are_found(aim):
    found = fit(run(), aim=aim)
    np.testing.assert_allclose(found.exposed, (5, 0.4), rtol=1e-4)
    np.testing.assert_allclose(found.management, (2, 0.1), rtol=1e-5)
    np.testing.assert_allclose(found.compute, (80, 0.05), rtol=1e-5)
    assert (found.warm_up, found.warm_up_tokens) == (pytest.approx(60), 64)


def test_reads_that_hide_behind_compute():
    found = fit(run(composition="overlapped", offset=-60.0))
    np.testing.assert_allclose(found.exposed, (-60, 0.4), rtol=1e-3)


def test_page_faults_are_told_apart_and_not_counted_twice():
    timings = run(faults=True)
    found = fit(timings)
    assert found.fault_ms == pytest.approx(0.25, rel=1e-6)
    assert timings.faults is not None
    assert found.faults == pytest.approx(timings.faults.mean(), rel=0.05)
    parts = found.parts(timings.read_mib, timings.age)
    assert parts.page_faults.mean() == pytest.approx(0.25 * timings.faults.mean(), rel=0.02)
    assert found.predict(timings.read_mib, timings.age).mean() == pytest.approx(timings.wall_ms.mean())


def test_only_the_chosen_tokens_are_fitted():
    timings, chosen = run(), np.arange(600) % 2 == 0
    wrong = np.where(chosen, 1, 1000)
    other = Timings(
        timings.composition, timings.age, timings.read_mib * wrong, timings.wall_ms,
        timings.exposed_ms * wrong, timings.management_ms, timings.compute_ms * wrong, None, 0,
    )  # fmt: skip
    first, second = fit(timings, chosen), fit(other, chosen)
    assert (first.exposed, first.management, first.compute) == (
        second.exposed,
        second.management,
        second.compute,
    )


def test_least_absolute_errors_against_a_search():
    generator = np.random.default_rng(3)
    x, y = generator.uniform(0, 5, 31), generator.exponential(4, 31)
    (offset, slope), loss = solve([np.ones(31), x], y, "median")
    # A best line goes through two of the points or is held at zero.
    pairs = [(i, j) for i in range(31) for j in range(i)]
    slopes = [0.0] + [(y[i] - y[j]) / (x[i] - x[j]) for i, j in pairs]
    lines = [(max(0.0, yi - b * xi), b) for b in slopes if b >= 0 for xi, yi in zip(x, y, strict=True)]
    best = min(np.abs(a + b * x - y).sum() for a, b in lines)
    assert loss == pytest.approx(best, rel=1e-9)
    assert np.abs(offset + slope * x - y).sum() == pytest.approx(best, rel=1e-6)


def test_a_constant_of_each_aim():
    y = np.array([1.0, 2.0, 9.0])
    assert solve([np.ones(3)], y, "mean")[0] == [pytest.approx(4)]
    assert solve([np.ones(3)], y, "median")[0] == [pytest.approx(2)]


def test_scores_by_hand():
    """Without noise, the model has no error and saves all of the others'."""
    check = check_time(run())
    assert [half.left_out for half in check.judged] == ["odd blocks", "even blocks", "second half"]
    for half in check.judged:
        constant, line, plain, going = half.scores
        assert plain.predictor == "model"
        assert plain.rmse_ms == pytest.approx(0, abs=0.01)
        assert going.rmse_ms == pytest.approx(0, abs=0.01)
        assert constant.rmse_ms > line.rmse_ms > 1
        assert line.model_saves_mse == pytest.approx(1, abs=1e-4)
        assert np.isclose(half.mean_ms * (1 + line.mean_error), line.mean_ms)
        assert all(part.mae_ms < 0.01 for part in half.parts)
    timings, odd = run(), np.arange(600) // 32 % 2 == 1
    left_out = timings.wall_ms[odd]
    constant = check.judged[0].scores[0]
    error = timings.wall_ms[~odd].mean() - left_out
    assert constant.mean_error == pytest.approx(error.mean() / left_out.mean())
    assert constant.rmse_ms == pytest.approx(np.sqrt((error**2).mean()))
    assert constant.mae_ms == pytest.approx(np.abs(error).mean())
    typical = np.abs(np.median(timings.wall_ms[~odd]) - left_out).mean()
    assert constant.typical_mae_ms == pytest.approx(typical, rel=1e-3)
    assert constant.rmse_interval.low < constant.rmse_ms < constant.rmse_interval.high


def test_slow_phases_are_seen_by_a_going_run_only():
    check = check_time(run(slow=200.0, noise=5.0))
    for half in check.judged[:2]:
        by_name = {score.predictor: score for score in half.scores}
        assert by_name[GOING].rmse_ms < 0.6 * by_name["model"].rmse_ms


def test_the_bound():
    assert check_time(run(offset=300.0)).bound == "reads"
    compute = check_time(run(offset=-60.0, composition="overlapped"))
    assert compute.bound == "compute"
    assert compute.without_reads_ms < compute.mean_ms


# Files


HEADING = "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct"


def rows_of(timings: Timings, *, stall: bool = False) -> list[str]:
    rows = []
    for i in range(timings.n):
        io = 4 * timings.exposed_ms[i] if stall else timings.exposed_ms[i]
        assert timings.management_ms is not None
        row = f"{i + 1},{timings.n},{timings.wall_ms[i]:.3f},{io:.3f},{timings.compute_ms[i]:.3f},"
        row += f"{round(timings.read_mib[i] * MIB)},50.0,"
        rows.append(
            row + (f"{timings.exposed_ms[i]:.3f}," if stall else "0.000,") + f"{timings.management_ms[i]:.3f}"
        )
    return rows


@pytest.mark.parametrize("composition", ["serial", "overlapped"])
def test_the_composition_is_read_off_the_columns(tmp_path, composition):
    """Without the setting, and with one that is wrong."""
    made = run(64, composition=composition)
    rows = rows_of(made, stall=composition == "overlapped")
    wrong = f"# bmoe_metrics v1\n# overlap={int(composition == 'serial')}\n"
    for settings in ("", wrong):
        path = write(tmp_path / "m.csv", rows, f"{HEADING},stall_ms,mgmt_ms", settings)
        timings = timings_of(read_metrics(path))
        assert timings.composition == composition
        np.testing.assert_allclose(timings.exposed_ms, made.exposed_ms, atol=1e-3)
        np.testing.assert_allclose(timings.read_mib, made.read_mib, atol=1e-6)


def test_overlap_without_its_stall_column(tmp_path):
    path = write(
        tmp_path / "m.csv", ["1,1,100,300,70,1048576,0"], HEADING, "# bmoe_metrics v1\n# overlap=1\n"
    )
    timings = timings_of(read_metrics(path))
    assert (timings.composition, timings.exposed_ms.tolist()) == ("overlapped", [30.0])


def test_parts_that_do_not_add_up_are_refused(tmp_path):
    path = write(tmp_path / "m.csv", ["1,1,100,10,10,1048576,0"], HEADING)
    with pytest.raises(InputError, match="neither io"):
        timings_of(read_metrics(path))


def test_tokens_without_a_time_are_left_out_and_counted(tmp_path):
    path = write(
        tmp_path / "m.csv", ["1,3,-1,10,10,1,0", "2,3,nan,1,1,1,0", "3,3,20,10,10,1048576,0"], HEADING
    )
    timings = timings_of(read_metrics(path))
    assert (timings.n, timings.left_out, timings.age.tolist()) == (1, 2, [2.0])
    with pytest.raises(InputError, match="no token has"):
        timings_of(read_metrics(write(path, ["1,1,-1,10,10,1,0"], HEADING)))


def test_one_token(tmp_path, capsys):
    path = write(tmp_path / "m.csv", ["1,1,100,30,70,1048576,0"], HEADING)
    assert main(["time", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Too few tokens" in text
    assert "not measured, in compute" in text
    check = check_time(timings_of(read_metrics(path)))
    assert check.judged == ()
    assert check.mean_parts == {"compute": 70, "page_faults": 0, "management": 0, "exposed_read": 30}


def test_all_hits(tmp_path):
    """No byte is read: nothing is said of reads, and a token is its compute."""
    rows = [f"{i + 1},40,{50 + i % 3},0,{50 + i % 3},0,100" for i in range(40)]
    check = check_time(timings_of(read_metrics(write(tmp_path / "m.csv", rows, HEADING))))
    assert check.model.exposed == Line(0, 0)
    assert check.mean_ms == pytest.approx(sum(check.mean_parts.values()))
    assert check.bound == "compute"
    assert len(check.judged) == 3


def test_the_same_bytes_every_token(tmp_path, capsys):
    rows = [f"{i + 1},40,{100 + i % 3},{60},{40 + i % 3},104857600,-1" for i in range(40)]
    path = write(tmp_path / "m.csv", rows, HEADING)
    found = fit(timings_of(read_metrics(path)))
    assert found.exposed == (0, pytest.approx(0.6))
    assert found.compute.slope == 0
    assert main(["time", str(path)]) == 0
    assert "cannot be checked" in capsys.readouterr().out


def test_the_fewest_tokens_that_are_judged():
    assert len(check_time(run(LEAST_TOKENS)).judged) == 3
    assert check_time(run(LEAST_TOKENS - 1)).judged == ()


@pytest.mark.parametrize(
    ("direct", "said"),
    [("1", "direct reads, flash timings"), ("0", "not flash timings"), ("", "unknown which")],
)
def test_buffered_reads_are_no_flash_timings(tmp_path, capsys, direct, said):
    settings = "# bmoe_metrics v1\n" + (f"# o_direct={direct}\n" if direct else "")
    path = write(tmp_path / "m.csv", ["1,1,100,30,70,1048576,0"], HEADING, settings)
    assert main(["time", str(path)]) == 0
    assert said in capsys.readouterr().out


def test_json(tmp_path, capsys):
    path = write(tmp_path / "m.csv", rows_of(run(64)), f"{HEADING},stall_ms,mgmt_ms")
    assert main(["time", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["composition"] == "serial"
    assert found["model"]["exposed"]["slope"] == pytest.approx(0.4, rel=1e-3)
    assert [s["predictor"] for s in found["judged"][0]["scores"]] == [
        "constant",
        "bytes alone",
        "model",
        GOING,
    ]
    assert set(found["judged"][0]["scores"][0]["rmse_interval"]) == {"low", "high"}
    assert main(["time", str(tmp_path / "none.csv")]) == 2


def test_the_recorded_run():
    """The issue's claim: the mean within 3 %, and a token closer than by a constant and by bytes alone."""
    check = check_time(timings_of(read_metrics(shared("bmoe/metrics-drop0.csv"))))
    assert check.model.composition == "overlapped"
    for half in check.judged[:2]:
        constant, line, plain, going = half.scores
        for score in (plain, going):
            assert abs(score.mean_error) < 0.03
            for error in ("rmse_ms", "mae_ms", "typical_mae_ms"):
                assert getattr(score, error) < min(getattr(constant, error), getattr(line, error))
    # The second half is faster than anything the first shows: said, not hidden.
    assert check.judged[2].scores[2].mean_error > 0.03


@pytest.mark.parametrize(
    ("name", "composition"), [("metrics-oldest", "serial"), ("qwen.metrics", "overlapped")]
)
def test_other_recorded_files(name, composition):
    timings = timings_of(read_metrics(shared(f"bmoe/{name}.csv")))
    check = check_time(timings)
    assert timings.composition == composition
    assert sum(check.mean_parts.values()) == pytest.approx(check.mean_ms, rel=0.01)
