"""What `--train` names, and what is learned from it, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from synthetic import from_batches, generate, make_header

from simlab.errors import InputError
from simlab.replay.columns import TraceColumns
from simlab.replay.training import load_training

HEADER = make_header(n_layer=2, n_expert=5, k=2)


@pytest.fixture
def columns(tmp_path):
    return TraceColumns(from_batches(HEADER, [[0, 1], [0, 2], [1, 0], [3, 4]]).write(tmp_path / "t"))


def test_counts_and_coactivation_by_hand(columns):
    part = load_training("75%", HEADER, columns)
    assert part.rows.sum() == 3 * 2
    assert part.counts.tolist() == [[3, 2, 1, 0, 0]] * 2
    together = part.coactivation
    assert together.shape == (2, 5, 5)
    for layer in together:
        assert layer.diagonal().tolist() == [3, 2, 1, 0, 0]
        assert (layer[0, 1], layer[0, 2], layer[1, 2]) == (2, 1, 0)
        assert (layer == layer.T).all()
    assert part.uncounted is part.rows
    assert not part.diagnostic


def test_a_part_of_a_token_is_none(columns):
    assert load_training("49%", HEADER, columns).rows.sum() == 1 * 2
    with pytest.raises(InputError, match="--train 24%: comes to no decode token; the trace has 4"):
        load_training("24%", HEADER, columns)


def test_the_same_trace_is_a_diagnostic_and_counts_every_row(columns):
    part = load_training("same", HEADER, columns)
    assert part.counts.tolist() == [[3, 2, 1, 1, 1]] * 2
    assert part.uncounted is None
    assert part.note.startswith("diagnostic")


def test_another_trace_teaches_decode_rows_of_counted_turns(tmp_path, columns):
    trace = generate(HEADER, seed=3, n_decode=4, throw_away=True)
    trace.write(tmp_path / "other")
    part = load_training(str(tmp_path / "other"), HEADER)
    decode = [row for row in trace.rows if row["phase"] == 1]
    assert part.rows.sum() == len(decode) == 8
    for at, layer in enumerate(HEADER.moe_layers):
        picks = [e for row in decode if row["layer"] == layer for e in row["router_experts"]]
        assert part.counts[at].tolist() == np.bincount(picks, minlength=5).tolist()
    assert part.uncounted is None


def test_a_batch_of_several_rows_counts_once(tmp_path):
    trace = from_batches(HEADER, [[0, 1], [0, 2]])
    for row in trace.rows:
        row["graph"], row["pos_in_graph"] = 0, row["step"]
    trace.rows.sort(key=lambda row: row["layer"])
    part = load_training("same", HEADER, TraceColumns(trace.write(tmp_path / "t")))
    assert part.counts.tolist() == [[1, 1, 1, 0, 0]] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100%", "above 0% and below 100%"),
        ("0%", "above 0% and below 100%"),
        ("a quarter", "not a share and no such trace; write 25%"),
    ],
)
def test_refusals(columns, text, message):
    with pytest.raises(InputError, match=message):
        load_training(text, HEADER, columns)


def test_a_live_run_wants_a_trace_and_of_its_model(tmp_path):
    for text in ("25%", "same"):
        with pytest.raises(InputError, match=f"--train {text}: a live run has no trace of its own"):
            load_training(text, HEADER)
    from_batches(HEADER, [[0, 1]]).write(tmp_path / "other")
    with pytest.raises(InputError, match="is of another model: n_expert 5, here 6"):
        load_training(str(tmp_path / "other"), dataclasses.replace(HEADER, n_expert=6))


def test_prefill_alone_teaches_nothing(tmp_path):
    trace = generate(HEADER, n_decode=0).write(tmp_path / "t")
    with pytest.raises(InputError, match="--train same: has no decode tokens"):
        load_training("same", HEADER, TraceColumns(trace))
