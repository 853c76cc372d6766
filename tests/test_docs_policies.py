"""The examples of docs/policies.md are complete: each runs in a replay and live, as it stands on the page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from synthetic import generate, make_header

from simlab.cells import build_cells, parse_route
from simlab.cli.main import main
from simlab.policy import builtin_policies
from simlab.record.live_route import LiveRoute
from simlab.replay.run import replay
from simlab.replay.slots import replay_slots

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "policies.md").read_text()
HEADER = make_header(n_layer=2, n_expert=12, k=3)


@pytest.fixture
def files(tmp_path):
    """The page's code blocks as files, by what the page calls them."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    found = {}
    for name, block in zip(("flat_bonus.py", "fading.py"), blocks, strict=True):
        assert f"`{name}`" in PAGE
        found[name] = tmp_path / name
        found[name].write_text(block)
    return found


def test_the_examples_run_in_a_replay_and_decide(files, tmp_path):
    trace = generate(HEADER, seed=4, n_decode=40).write(tmp_path / "t")
    plain = replay(trace, build_cells(budgets=["40%"])[0])
    (cell,) = build_cells(
        budgets=["40%"], routes=[f"{files['flat_bonus.py']}:bonus=1"], evicts=[str(files["fading.py"])]
    )
    mine = replay(trace, cell)
    assert (mine.decode.substituted or 0) > 0
    assert mine.decode.misses < plain.decode.misses
    (evicting,) = build_cells(budgets=["40%"], evicts=[str(files["fading.py"])])
    other = replay(trace, evicting)
    assert other.decode.lookups == plain.decode.lookups
    assert other.decode.misses != plain.decode.misses


def test_the_routing_example_decides_on_live_rows_what_the_replay_decided(files, tmp_path):
    rows = generate(HEADER, seed=4, n_decode=30)
    spec = f"{files['flat_bonus.py']}:bonus=1"
    (cell,) = build_cells(budgets=["40%"], routes=[spec])
    slots = replay_slots(rows.write(tmp_path / "t"), cell).slots
    live = LiveRoute(parse_route(spec), 3, 12, 2, "prob", HEADER.weight_rule)
    at = 0
    for row in rows.rows:
        batch = slots[at : at + 3]
        at += 3
        if row["phase"] == 0:
            continue
        # Only what the snapshot says of the executed and the router's experts is known here; residents outside
        # both cannot have won, or they would be executed.
        resident = np.zeros(12, bool)
        resident[batch.filter(batch["residency"] == 1)["expert"].to_numpy()] = True
        router = np.array([row["router_experts"]], np.int32)
        found = live.rerank(row["layer"], row["scores"][None], router, resident)
        assert set(found.experts[0].tolist()) == set(batch["expert"].to_list())


@pytest.mark.slow
def test_both_examples_run_live_and_replay_slot_for_slot(files, tmp_path):
    pytest.importorskip("llama_cpp", reason="the live engine's extra is not installed")
    from live import TEXT, THREADS, blanked, record

    from simlab.record.engine import Engine

    (cell,) = build_cells(
        budgets=["2cycles"], routes=[f"{files['flat_bonus.py']}:bonus=1"], evicts=[str(files["fading.py"])]
    )
    with Engine(n_threads=THREADS) as engine:
        trace = record(engine, engine.tokenize(TEXT)[:32], cell, tmp_path / "live.trace")
    found = replay_slots(blanked(trace, tmp_path / "blank.trace"), cell)
    recorded = trace.routing.collect()
    for replayed, column in (("expert", "experts"), ("residency", "residency"), ("read_bytes", "read_bytes")):
        np.testing.assert_array_equal(
            found.slots[replayed].to_numpy(), recorded[column].to_numpy().reshape(-1), err_msg=column
        )
    assert (found.numbers.decode.substituted or 0) > 0
    assert found.numbers.decode.evictions > 0


def test_the_page_names_files_and_inputs_that_exist():
    for path in re.findall(r"`((?:policies|simlab)/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
    named = set(re.findall(r"^\| `\"(\w+)\"` \|", PAGE, re.MULTILINE))
    asked = frozenset().union(*(p.needs for p in builtin_policies().values() if hasattr(p, "stage")))
    assert named == {"scores", "rank", "weights", "mass", "lighter"} >= asked


def test_the_page_of_built_in_policies_is_what_the_command_prints(capsys):
    assert main(["policies", "--markdown"]) == 0
    assert (ROOT / "docs" / "builtin-policies.md").read_text() == capsys.readouterr().out
