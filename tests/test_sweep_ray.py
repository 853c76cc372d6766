"""A sweep over a local Ray cluster, one of its workers killed on the way, gives the table of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import polars as pl
import pytest
from synthetic import generate, make_header

from simlab.cells import build_cells
from simlab.cli.main import main
from simlab.cli.output import cells_to_frame
from simlab.errors import InputError
from simlab.replay import cluster
from simlab.replay.cluster import check_address
from simlab.replay.run import sweep

ROUTES = ["substitute:L=0", "substitute:L=.1", "original"]
BUDGETS = ["6/layer", "8/layer", "1.5cycles"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray") / "t.trace"
    return generate(make_header(), n_decode=12).write(folder)


def test_an_address_that_cannot_be(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="ray is not installed; pip install"):
        check_address("local")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for wrong in ("local:", "local:0", "local:two"):
        with pytest.raises(InputError, match="local:N with N workers"):
            check_address(wrong)
    for right in ("local", "local:2", "10.0.0.1:6379", "ray://head:10001"):
        check_address(right)


def test_cells_travel_as_words():
    cells = build_cells(
        budgets=["2cycles", "off"], routes=["original", "top_k:k=3"], evicts=["lru", "lfu_decay:half_life=64"]
    )
    for cell in cells:
        assert cluster._cell(cluster._words(cell)) == cell


def test_a_policy_file_that_is_another_one_there_is_refused(tmp_path):
    source = (Path(__file__).parents[1] / "policies" / "substitute.py").read_text()
    own = tmp_path / "mine.py"
    own.write_text(source)
    (cell,) = build_cells(budgets=["2cycles"], routes=[f"{own}:L=.1"])
    words = cluster._words(cell)
    assert cluster._cell(words).route.knobs == cell.route.knobs
    own.write_text(source + "\n# Changed since.\n")
    with pytest.raises(InputError, match=r"mine\.py is another one on machine"):
        cluster._cell(words)


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Lets the first attempt at one group kill its own worker; a file per attempt tells who ran."""
    folder = tmp_path / "attempts"
    folder.mkdir()
    run_group = cluster._run_group

    def attempt(where, code, trace, words, train):
        me = folder / str(os.getpid())
        me.touch()
        fatal = folder / "killed"
        # The group of the margin without a route of its own dies once, in the middle of its work.
        if any(word.knobs.get("L") == 0.1 for w in words for word in w.steps):
            try:
                fatal.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return run_group(where, code, trace, words, train)

    monkeypatch.setattr(cluster, "_run_group", attempt)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own.
def test_one_worker_killed_on_the_way(trace, tmp_path, pids, monkeypatch):
    pytest.importorskip("ray")
    other = generate(make_header(), n_decode=12, seed=5).write(tmp_path / "other.trace")
    out = tmp_path / "s.parquet"
    # One of them at a URL, of which there is one copy on this machine.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{other.path}"
    words = ["sweep", str(trace.path), url, "--budget", ",".join(BUDGETS), "--group", "3"]
    words += [word for route in ROUTES for word in ("--route", route)]
    assert main([*words, "--ray", "local:2", "--out", str(out)]) == 0
    assert (pids / "killed").exists()
    workers = {p.name for p in pids.iterdir()} - {"killed"}
    assert len(workers) >= 3, "two workers and the one that took the dead one's place"
    assert str(os.getpid()) not in workers
    table = pl.read_parquet(out)
    cells = build_cells(budgets=BUDGETS, routes=ROUTES)
    for name, one in ((str(trace.path), trace), (url, other)):
        mine = table.filter(pl.col("trace") == name).drop("trace")
        assert mine.equals(cells_to_frame(sweep(one, cells)))
    assert not Path(f"{out}.parts").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_a_worker_refuses_is_said_in_one_line(trace, tmp_path, capsys, monkeypatch):
    pytest.importorskip("ray")
    out = tmp_path / "s.parquet"
    words = ["sweep", str(trace.path), "--budget", "2cycles,3cycles", "--group", "1", "--out", str(out)]
    monkeypatch.setattr(cluster, "code_digest", lambda: "another")
    assert main([*words, "--ray", "local:1"]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("simlab: error: --ray: machine ")
    assert error[-1].endswith("has another version of simlab")


def test_a_cluster_that_is_not_there(trace, capsys):
    pytest.importorskip("ray")
    assert main(["sweep", str(trace.path), "--budget", "2cycles", "--ray", "127.0.0.1:1"]) == 2
    assert "--ray 127.0.0.1:1: cannot be reached" in capsys.readouterr().err
