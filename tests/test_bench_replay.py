"""`simlab bench replay` compares equal results and measures what it says; no times are judged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from synthetic import from_batches, generate, make_header, raw_logits

from simlab.bench import contenders, history, text
from simlab.bench.generate import PREFILL_TOKENS, generate_trace
from simlab.bench.replay import check_counts, check_on_the_way, check_slots
from simlab.bench.scaling import scaling
from simlab.bench.scratch import scratch_folder
from simlab.bench.workload import Workload, grid
from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.errors import InputError, RunError
from simlab.replay.run import sweep
from simlab.trace.store import open_trace

SMALL = ["--tokens", "12", "--layers", "3", "--experts", "16", "--cells", "4", "--repeats", "2"]
VARIANTS = [{"parallel": p, "linked": link} for p in (False, True) for link in (False, True)]


@pytest.fixture(scope="module")
def hard(tmp_path_factory):
    """A trace with what the rules are about: wide graphs, ties, turns, a throw-away graph, entries of two sizes."""
    trace = generate(
        make_header(sizes=(1000, 1700)),
        n_prefill=5,
        n_decode=10,
        n_turns=2,
        tokens_per_decode_graph=2,
        throw_away=True,
        grain=0.5,
        last_layer_one_row=True,
    )
    return trace.write(tmp_path_factory.mktemp("hard") / "t.trace")


@pytest.fixture(scope="module")
def hard_cells():
    return build_cells(budgets=["2%", "1.2cycles", "40%", "100%"], margins=["0", ".1", ".4", "1"])


@pytest.fixture(scope="module")
def truth(hard, hard_cells):
    return [contenders.counts_of(n) for n in sweep(hard, hard_cells)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_loop_gives_the_replayers_counts(hard, hard_cells, truth, variant):
    assert sum(c["decode"]["substituted"] for c in truth) > 100
    assert sum(c["all"]["evictions"] for c in truth) > 100
    found = contenders.hand_written(hard.path, hard_cells, **variant)
    assert found.counts == truth
    assert found.whole_s >= found.alone_s > 0
    assert sum(found.stages.values()) == pytest.approx(found.whole_s)


def test_what_is_in_memory_is_not_read(tmp_path, hard, hard_cells, truth):
    """The same counts by every contender, after the trace's folder is gone."""
    copy = tmp_path / "t.trace"
    shutil.copytree(hard.path, copy)
    decoded = contenders.in_memory(open_trace(copy))
    shutil.rmtree(copy)
    assert contenders.replayer(decoded, hard_cells).counts == truth
    assert contenders.hand_written(decoded, hard_cells, linked=True).counts == truth
    plain = [i for i, cell in enumerate(hard_cells) if not cell.margin]
    found = contenders.ordered_dict(decoded, [hard_cells[i] for i in plain]).counts
    assert found == [truth[i] for i in plain]


def test_the_loop_and_the_replayer_agree_on_the_way(hard, hard_cells, monkeypatch):
    assert check_on_the_way(hard, hard_cells) >= hard.n_rows // 10
    # One token's scores belong to other experts.
    read = contenders.Loop._read

    def other(self, start, stop):
        rows = read(self, start, stop)
        return rows._replace(values=np.roll(rows.values, 1, axis=1)) if start <= 60 < stop else rows

    monkeypatch.setattr(contenders.Loop, "_read", other)
    with pytest.raises(RunError, match=r"by the loop, up to row \d+"):
        check_on_the_way(hard, hard_cells)


@pytest.mark.parametrize("stretch", [1, 7])
def test_a_stretch_ends_with_a_batch(hard, hard_cells, truth, stretch, monkeypatch):
    monkeypatch.setattr(contenders, "_ROWS", stretch)
    assert contenders.hand_written(hard.path, hard_cells, linked=True).counts == truth


def test_the_loop_gives_the_replayers_slots(hard, hard_cells):
    # Slots of the throw-away turn are in the table too.
    for cell in (hard_cells[2], hard_cells[7], hard_cells[-1]):
        assert check_slots(hard, cell) == hard.n_rows * hard.width


def test_the_loop_ranks_as_the_rules_say(tmp_path):
    """Infinite scores are neither boosted nor counted in the range; of equal ones the lower id wins."""
    trace = generate(make_header(n_layer=1, n_expert=6, k=2, gating="logits", space="raw"), n_prefill=0, n_decode=4,
                     scorer=raw_logits)  # fmt: skip
    inf = float("inf")
    scores = [
        [3, 2, 1, 0, 0, 0],
        [0, 2, 2, 2, 0, 0],
        [inf, -inf, 0, 1, 3, 3],
        [-inf, -inf, 5, -inf, -inf, -inf],
    ]
    for row, values in zip(trace.rows, scores, strict=True):
        row["scores"] = np.array(values, np.float32)
        row["router_experts"] = [int(e) for e in np.argsort(-row["scores"], kind="stable")[:2]]
    opened = trace.write(tmp_path / "t.trace")
    cells = build_cells(budgets=["3cycles"], margins=[".5"])
    kept = contenders.hand_written(opened.path, cells, slots=True).slots
    assert kept is not None
    # Row 2: 0 and 1 are resident and gain half of the range of 2: 1, 3, so 1 before the tied 2. Row 3: 0 is first
    # whatever is resident; 1, 2 and 3 gain nothing that passes 4. Row 4: the range of one value is zero.
    assert kept[0, :, :, 0].tolist() == [[0, 1], [1, 2], [0, 4], [2, 0]]
    assert kept[0, :, :, 1].tolist() == [[0, 0], [1, 0], [1, 0], [1, 1]]
    assert [c["decode"] for c in contenders.hand_written(opened.path, cells).counts] == [
        contenders.counts_of(n)["decode"] for n in sweep(opened, cells)
    ]


def test_a_plain_dict_by_hand(tmp_path):
    """Room for two of {0,1}, {0,2}, {0,1}, {0,3}, {0,1}: only 0 ever hits (policies.md, conformance)."""
    header = make_header(n_layer=1, n_expert=4, k=2)
    trace = from_batches(header, [(0, 1), (0, 2), (0, 1), (0, 3), (0, 1)]).write(tmp_path / "t.trace")
    (counts,) = contenders.ordered_dict(trace.path, build_cells(budgets=["1cycles"])).counts
    found = counts["decode"]
    assert (found["lookups"], found["hits"], found["misses"], found["evictions"]) == (10, 4, 6, 4)
    assert found["cold_misses"] == 4
    assert found["read_mib"] == 6000 / 2**20


def test_a_plain_dict_gives_the_replayers_counts(hard, hard_cells, truth):
    plain = [i for i, cell in enumerate(hard_cells) if not cell.margin]
    assert len(plain) == 4
    assert contenders.ordered_dict(hard.path, [hard_cells[i] for i in plain]).counts == [
        truth[i] for i in plain
    ]
    with pytest.raises(InputError, match="original routing only"):
        contenders.ordered_dict(hard.path, hard_cells)


def test_a_difference_stops_the_bench(hard, hard_cells, truth, monkeypatch):
    wrong = json.loads(json.dumps(truth[5]))
    wrong["decode"]["hits"] += 1
    with pytest.raises(RunError, match=r"decode hits is \d+ by the replayer and \d+ by it"):
        check_counts("it", hard_cells[5], wrong, truth[5])
    run = contenders.hand_written

    def other(*args, **named):
        found = run(*args, **named)
        assert found.slots is not None
        found.slots[0, 20, 1, 1] ^= 1
        return found

    monkeypatch.setattr(contenders, "hand_written", other)
    with pytest.raises(
        RunError, match=f"residency differs from the loop's, first at slot {20 * hard.width + 1} "
    ):
        check_slots(hard, hard_cells[2])


def test_what_the_loops_do_not_know_is_refused(hard):
    others: list[dict[str, Any]] = [
        {"evicts": ["lfu"]},
        {"scope": "per_layer"},
        {"routes": ["drop_cold:F=.5"]},
        {"sequential": True},
    ]
    for options in others:
        with pytest.raises(InputError, match="the loop knows substitute with one global lru"):
            contenders.hand_written(hard.path, build_cells(budgets=["2cycles"], **options))


# -- workloads -----------------------------------------------------------------------------------------------


def test_a_generated_trace_is_in_order_and_the_same_whatever_its_parts(tmp_path, monkeypatch):
    sizes: dict[str, Any] = {"n_tokens": 30, "n_layers": 3, "n_expert": 16, "k": 4}
    whole = generate_trace(tmp_path / "whole.trace", **sizes)
    monkeypatch.setattr("simlab.bench.generate._PART_BYTES", 5 * 3 * 16 * 4)
    cut = generate_trace(tmp_path / "cut.trace", **sizes)
    assert len(list((tmp_path / "cut.trace" / "routing").iterdir())) > len(
        list((tmp_path / "whole.trace" / "routing").iterdir())
    )
    table = whole.routing.collect()
    assert table.equals(cut.routing.collect())
    other = generate_trace(tmp_path / "other.trace", **sizes, seed=1).routing.collect()
    assert not table["scores"].equals(other["scores"])
    assert table.height == 30 * 3
    assert table["graph"].n_unique() == 1 + 30 - PREFILL_TOKENS
    assert table["step"].unique().sort().to_list() == list(range(30))
    scores, ids = table["scores"].to_numpy(), table["router_experts"].to_numpy()
    assert np.allclose(scores.sum(axis=1), 1)
    assert np.array_equal(ids, np.argsort(-scores, axis=1, kind="stable")[:, :4])
    # Scores of a token resemble those of the token before at the same layer, and not those of another layer.
    by_token = np.log(scores[PREFILL_TOKENS * 3 :]).reshape(-1, 3, 16)
    near = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(by_token[:-1, 0], by_token[1:, 0], strict=True)])
    far = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(by_token[:, 0], by_token[:, 1], strict=True)])
    assert near > 0.4
    assert near > far + 0.2


def test_a_trace_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not fit"):
        generate_trace(tmp_path / "t.trace", n_tokens=10**9, n_layers=40, n_expert=256, k=8)
    assert not (tmp_path / "t.trace").exists()


@pytest.mark.parametrize("n", [1, 2, 7, 12, 64])
def test_a_grid_has_as_many_cells_as_asked_for(n):
    cells = grid(n)
    assert len(cells) == n
    assert len({(c.margin, c.budget) for c in cells}) == n
    assert n != 64 or len({c.margin for c in cells}) == len({c.budget for c in cells}) == 8


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_its_two_forms_and_its_history(capsys, tmp_path):
    past = tmp_path / "h.jsonl"
    assert main(["bench", "replay", *SMALL, "--history", str(past)]) == 0
    said = capsys.readouterr().out
    for words in ("36 routing events", "replayer", "numba, 1 core", "OrderedDict", "load", "the rest"):
        assert words in said
    assert main(["bench", "replay", *SMALL, "--against", str(past), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["rows"] == 36
    assert found["slots_equal"] == {"cells": 4, "slots": 4 * 36 * 8}
    for row in found["contenders"]:
        for figure in ("whole_ns", "memory_ns", "alone_ns", "whole_ratio", "memory_ratio", "alone_ratio"):
            assert 0 < row[figure]["low"] <= row[figure]["median"] <= row[figure]["high"]
        assert row["whole_ns"]["median"] >= row["alone_ns"]["median"]
    for which in history.TIMES:
        assert found["contenders"][0][f"{which}_ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert [r["name"] for r in found["contenders"] if "times_one_core" in r] == [
        r["name"] for r in found["contenders"] if r["name"].endswith("cores")
    ]
    (line,) = (json.loads(row) for row in past.read_text().splitlines())
    assert set(line["machine"]) == {"cpu", "cores"}
    assert found["against"]["commit"] == line["commit"]
    assert {c["name"] for c in found["against"]["changes"]} == {r["name"] for r in found["contenders"]}


def test_a_history_is_of_one_machine_and_workload(tmp_path):
    path = tmp_path / "h.jsonl"
    base = {
        "date": "d", "commit": "c", "machine": {"cpu": "x", "cores": 2}, "workload": {"cells": 4},
        "first_run_s": 1.0, "whole_ns": {"a": 2.0, "b": 1.0}, "alone_ns": {"a": 1.0, "b": 1.0},
    }  # fmt: skip
    # A line from before what is timed in memory was.
    history.append(path, base | {"commit": "first"})
    history.append(path, base | {"commit": "second"})
    history.append(path, base | {"commit": "elsewhere", "machine": {"cpu": "y", "cores": 2}})
    history.append(path, base | {"commit": "larger", "workload": {"cells": 8}})
    past = history.last_of(path, base)
    assert past is not None
    assert past["commit"] == "second"
    now = base | {f"{which}_ns": {"a": 4.0, "new": 1.0} for which in history.TIMES}
    (change,) = history.change(past, now)
    assert (change["name"], change["whole_then_ns"], change["whole_now_ns"]) == ("a", 2.0, 4.0)
    assert "memory_then_ns" not in change
    assert "memory ns" not in text.change(past, [change])
    (change,) = history.change(now, now | {"memory_ns": {"a": 3.0, "new": 1.0}})[:1]
    assert (change["memory_then_ns"], change["memory_now_ns"]) == (4.0, 3.0)
    assert history.last_of(path, base | {"machine": {"cpu": "z", "cores": 1}}) is None
    path.write_text("[]\n")
    with pytest.raises(InputError, match="line 1 is not of simlab bench replay"):
        history.last_of(path, base)
    with pytest.raises(InputError, match="No such file"):
        history.last_of(tmp_path / "none", base)


def test_outside_a_clone_the_commit_is_unknown(monkeypatch):
    def fail(*_args, **_named):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", fail)
    assert history.commit() == "unknown"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "8"], "must be between 9 and"),
        (["--experts", "1"], "must be between 2 and"),
        (["--scaling", "slots"], "there are cells, experts, tokens"),
        (["--workload", "qwen"], "needs --trace"),
        (["--scaling", "--history", "h.jsonl"], "--history: holds comparisons"),
        (["--scratch", "/nowhere"], "no such folder"),
        (["--trace", "/nowhere.trace"], "/nowhere.trace"),
    ],
)
def test_bad_options_are_one_line(capsys, options, words):
    assert main(["bench", "replay", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert words in error[0]


@pytest.mark.slow
def test_scaling_leaves_out_what_would_take_too_long():
    said: list[str] = []
    found = scaling(
        Workload(4, 12, 3, 16),
        ["cells", "tokens"],
        repeats=1,
        point_s=60,
        say=said.append,
        axis_values={"cells": (2, 4), "tokens": (12, 10**8)},
    )
    assert [p["cells"] for p in found["cells"]] == [2, 4]
    for point in (*found["cells"], found["tokens"][0]):
        assert point["replayer_whole_ns"] >= point["replayer_alone_ns"] > 0
        assert point["numba_1_core_whole_ns"] >= point["numba_1_core_alone_ns"] > 0
        assert point["first_run_s"] > 0
    assert "would take about" in found["tokens"][1]["skipped"]
    assert "replayer_whole_ns" not in found["tokens"][1]
    assert any("left out" in line for line in said)


@pytest.mark.slow
def test_a_long_trace_is_replayed_in_a_process_of_its_own(capsys):
    assert main(["bench", "replay", *SMALL, "--tokens", "1300", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["rows"] == 3000
    assert (found["long"]["tokens"], found["long"]["short_tokens"]) == (1300, 1000)
    assert 2**26 < found["long"]["short_peak_rss_bytes"] <= found["long"]["peak_rss_bytes"] < 2**32
    assert found["long"]["ratio"] == pytest.approx(
        found["long"]["s_per_token"] / found["long"]["short_s_per_token"]
    )


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_for_long(tmp_path, how):
    code = (
        "import sys; from pathlib import Path; from simlab.bench.scratch import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'f').write_text('x'); print('ready', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        (folder,) = tmp_path.iterdir()
        # One that lives keeps its own.
        with scratch_folder(tmp_path) as mine:
            assert set(tmp_path.iterdir()) == {folder, mine}
        child.send_signal(how)
        child.wait()
    assert list(tmp_path.iterdir()) == ([] if how == signal.SIGTERM else [folder])
    with scratch_folder(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_is_timed_cold_and_warm(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("simlab.bench.command.BUDGETS", ("1MiB", "2MiB"))
    monkeypatch.setattr("simlab.bench.command.EVICTS", ("lru", "layer_lru"))
    generate(make_header(sizes=(100_000,)), n_decode=5).write(tmp_path / "t.trace")
    words = ["bench", "replay", "--workload", "qwen", "--trace", str(tmp_path / "t.trace"), "--repeats", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cells"] == 4
    cold, cached = (found[f"command_{w}_cache_s"]["median"] for w in ("without", "with"))
    assert 0 < found["warm_s"]["median"] < min(cold, cached)
    assert set(found["stages_s"]) == {"load", "prepare columns", "the rest"}
