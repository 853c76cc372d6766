"""The read model: latencies, rounds and waits by hand, against a slow queue of lanes, and fits of made waits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simlab.judge.speed.trace_time_reads import (
    Latencies,
    ReadModel,
    Slices,
    capped,
    fit_reads,
    latencies_of,
    layers_since_read,
    misses_of,
    slices_of,
    spans_of,
)
from simlab.trace.store import open_trace

ORIGINAL = Path(__file__).resolve().parent.parent / "traces" / "original.trace"
KNOWN = Latencies({4096: {1: 100.0, 4: 160.0}, 8192: {1: 140.0, 4: 200.0}})


def test_latencies_by_hand():
    assert KNOWN.at(4096, 1) == 100
    assert KNOWN.at(4096, 2) == 120
    assert KNOWN.at(6144, 1) == 120
    # Larger than any: the slope goes on. Smaller: no faster than the smallest. More company: the device is shared.
    assert KNOWN.at(12288, 1) == 180
    assert KNOWN.at(512, 1) == 100
    assert KNOWN.at(4096, 8) == 320
    one_size = Latencies({4096: {1: 100.0}})
    assert [one_size.at(size, 1) for size in (1024, 4096, 8192)] == [100, 100, 200]


def test_composed_times_by_hand():
    assert KNOWN.composed_ms(4096, 0, 4) == 0
    assert KNOWN.composed_ms(4096, 1, 4) == pytest.approx(0.100)
    assert KNOWN.composed_ms(4096, 4, 4) == pytest.approx(0.160)
    # Ten over four lanes in full company: two and a half times.
    assert KNOWN.composed_ms(4096, 10, 4) == pytest.approx(0.400)


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 99))
def test_composed_times_are_those_of_a_queue(slices, lanes, seed):
    """An independent queue, every read to the lane that is free first: all lanes are busy but for the last reads."""
    generator = np.random.default_rng(seed)
    free, took = [0.0] * lanes, generator.uniform(40, 60, slices)
    for read in took:
        free[min(range(lanes), key=free.__getitem__)] += read
    flat = Latencies({4096: {1: 50.0, 8: 50.0}})
    composed = 1e3 * flat.composed_ms(4096, slices, lanes)
    assert 0.8 * composed <= max(free) <= 1.2 * composed + 60 * (slices > lanes)


def model(**other) -> ReadModel:
    given = {
        "latencies": Latencies({4096: {1: 100.0, 2: 100.0}}), "lanes": 2, "slices": (Slices(3, 0, 4096.0),) * 2,
        "hand_over_ms": 0.05, "share": 1.5, "hidden_ms": 0.0,
    }  # fmt: skip
    return ReadModel(**{**given, **other})


def test_waits_by_hand():
    """Three slices over two lanes: one miss takes one and a half reads, two three, four six."""
    misses = np.array([[0, 0], [1, 0], [2, 4]])
    expected = [0, 0.05 + 1.5 * 0.15, (0.05 + 1.5 * 0.3) + (0.05 + 1.5 * 0.6)]
    np.testing.assert_allclose(model().waits(misses), expected)
    # The first read comes three layers after what is taken to have read, the second two later, the third one.
    np.testing.assert_array_equal(layers_since_read(misses), [[1, 2], [3, 1], [2, 1]])
    woken = model(waking_ms=0.01)
    more = np.array([0, 0.01 * np.log2(3), 0.01])
    np.testing.assert_allclose(woken.waits(misses), expected + more)
    np.testing.assert_allclose(woken.slowed(2).waits(misses), 2 * woken.waits(misses))


def test_overlapped_waits_by_hand():
    """Two slices early, one late: of one miss the late one's half of a read hides but for 0.02 ms."""
    late = model(slices=(Slices(2, 1, 4096.0),), hidden_ms=0.03, hand_over_ms=0.0, share=1.0)
    np.testing.assert_allclose(late.waits(np.array([[0], [1]])), [0, 0.1 + 0.02])
    hidden = model(slices=(Slices(2, 1, 4096.0),), hidden_ms=0.3, hand_over_ms=0.0, share=1.0)
    np.testing.assert_allclose(hidden.waits(np.array([[1], [2]])), [0.1, 0.2])


@pytest.mark.parametrize("composition", ["serial", "overlapped"])
def test_made_waits_are_found_again(composition):
    generator = np.random.default_rng(1)
    misses = generator.integers(0, 9, (400, 2))
    late = composition == "overlapped"
    true = model(slices=(Slices(3 - late, int(late), 4096.0),) * 2, hidden_ms=0.125 * late)
    waits = true.waits(misses)
    found = fit_reads(true.latencies, 2, true.slices, misses, waits, 0.25, composition)
    np.testing.assert_allclose(found.waits(misses).mean(), waits.mean(), rtol=0.01)
    np.testing.assert_allclose(found.share, 1.5, rtol=0.05)
    assert found.hidden_ms == pytest.approx(0.125 * late)


def test_made_spans_are_found_again():
    """Waits of batches as the model has them, of which a tenth of a millisecond is outside the reads' spans."""
    generator = np.random.default_rng(2)
    misses = generator.integers(0, 9, (400, 3)) * (generator.random((400, 3)) < 0.4)
    true = model(slices=(Slices(3, 0, 4096.0),) * 3, hand_over_ms=0.15, waking_ms=0.03)
    spans = np.where(
        misses > 0, 0.05 + 0.03 * np.log2(layers_since_read(misses)) + 1.5 * 0.15 * misses, np.nan
    )
    found = fit_reads(true.latencies, 2, true.slices, misses, true.waits(misses), 0.25, "serial", spans)
    np.testing.assert_allclose(found.waking_ms, 0.03, rtol=0.05)
    np.testing.assert_allclose(found.share, 1.5, rtol=0.02)
    np.testing.assert_allclose(found.hand_over_ms, 0.15, rtol=0.1)


def test_capped_keeps_all_but_the_longest():
    values = np.array([1.0] * 99 + [1000.0])
    assert capped(values).max() < 2
    assert len(capped(np.array([]))) == 0


def test_a_recorded_trace():
    """Its misses are those its tokens counted, and its reads are told by three slices an expert over four lanes."""
    trace = open_trace(ORIGINAL)
    graph, misses = misses_of(trace)
    tokens = trace.tokens.filter(phase=1).sort("graph").collect()
    assert graph.tolist() == tokens["graph"].to_list()
    assert misses.sum(axis=1).tolist() == (tokens["lookups"] - tokens["hits"]).to_list()
    found = latencies_of(trace)
    assert found is not None
    latencies, lanes = found
    assert lanes == 4
    assert set(latencies.microseconds) == set(trace.reads.collect()["window_bytes"].unique().to_list())
    slices = slices_of(trace, "serial")
    assert {(s.early, s.late) for s in slices} == {(3, 0)}
    assert {(s.early, s.late) for s in slices_of(trace, "overlapped")} == {(2, 1)}
    waits = tokens["read_wait_ns"].to_numpy() / 1e6
    spans = spans_of(trace, graph)
    assert (np.isfinite(spans) == (misses > 0)).all()
    first = trace.reads.filter(graph=int(graph[0]), layer=0).collect()
    starts = first["start_ns"].to_numpy()
    assert spans[0, 0] == pytest.approx(
        ((starts + first["latency_ns"].to_numpy()).max() - starts.min()) / 1e6
    )
    fitted = fit_reads(latencies, lanes, slices, misses, waits, 0.2, "serial", spans)
    assert fitted.waits(misses).mean() == pytest.approx(capped(waits).mean(), rel=0.03)
    more = fitted.waits(np.arange(9)[:, None].repeat(8, axis=1))
    assert (np.diff(more) >= 0).all()


def test_a_trace_without_read_times(tmp_path):
    trace = open_trace(ORIGINAL)
    untimed = dataclasses.replace(trace, reads=trace.reads.with_columns(latency_ns=pl.lit(None, pl.Int64)))
    assert latencies_of(untimed) is None
