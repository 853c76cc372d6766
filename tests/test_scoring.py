"""Perplexity and choices on the embedded model, and results that survive a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from live import TEXT, THREADS, cell_of, plain_logits

from simlab.cli.main import main
from simlab.errors import InputError
from simlab.judge.measure import measure
from simlab.judge.scores import build_items, choices, ppl, scoring
from simlab.judge.scores.choices import answer_items, prompt_graphs, read_items, tokenise
from simlab.judge.scores.ppl import Text, score_texts
from simlab.judge.scores.scoring import Engines, Results, cell_numbers
from simlab.record.engine import EMBEDDED_MODEL
from simlab.record.llama import log_probability
from simlab.record.plan import SKIP, text_graphs, wide_graphs
from simlab.record.recorder import Recorder
from simlab.replay.run import replay
from simlab.trace.store import TraceWriter, open_trace
from simlab.types import DECODE, THROW_AWAY_TURN

ITEMS = Path(EMBEDDED_MODEL).with_name("choices-100.jsonl")


@pytest.fixture(scope="module")
def engines():
    with Engines(None, {"n_threads": THREADS}) as opened:
        yield opened


def failed(capsys, arguments):
    """Exit status 2 and exactly one line on stderr; returns it."""
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


# -- perplexity -------------------------------------------------------------------------------------------


def test_step_losses_are_plain_llama_cpps(engines):
    tokens = engines.get().tokenize(TEXT[:30])
    (score,) = score_texts(engines, [cell_of("2cycles")], [Text("t", tokens)])
    logits = plain_logits(tokens)[1:]
    golden = [-log_probability(row, t) for row, t in zip(logits, tokens[SKIP + 1 :], strict=True)]
    assert score.losses[0].tolist() == golden
    assert len(golden) == len(tokens) - 9
    assert score.numbers.nll == pytest.approx(np.mean(golden))
    assert score.numbers.ppl == pytest.approx(math.exp(np.mean(golden)))
    first_choice = [int(np.argmax(row)) == t for row, t in zip(logits, tokens[SKIP + 1 :], strict=True)]
    assert score.hit_rate == np.mean(first_choice)
    assert score.numbers.decode.tokens == len(golden)
    assert score.numbers.all.tokens == len(tokens) - 1
    assert score.difference == 0
    assert score.difference_interval == (0, 0)


def test_wide_touches_far_fewer_slots_than_step(engines):
    tokens = engines.get().tokenize(TEXT[:120])
    cells, text = [cell_of("2cycles"), cell_of("2cycles", "substitute:L=.2")], [Text("t", tokens)]
    step = score_texts(engines, cells, text)
    wide = score_texts(engines, cells, text, wide=True)
    # Matrix products of many rows round otherwise than those of one, which decides near-ties of the router.
    assert np.abs(wide[0].losses[0] - step[0].losses[0]).mean() < 0.02
    assert step[0].numbers.decode.reranked == wide[0].numbers.decode.reranked == 0
    stepped, at_once = step[1].numbers.decode, wide[1].numbers.decode
    assert at_once.reranked == at_once.slots > stepped.slots
    assert (stepped.substituted or 0) / stepped.slots > 3 * (at_once.substituted or 0) / at_once.slots
    assert at_once.tokens == len(tokens) - 1
    assert wide[1].numbers.tok_s is not None
    assert wide[1].numbers.tok_s > 0


def test_wide_graphs_cover_the_windows_of_step_mode():
    step = [g for g in text_graphs(2100, 1024, 512) if g.phase == DECODE]
    wide = list(wide_graphs(2100, 1024))
    assert [(g.turn, g.start, g.stop) for g in wide] == [(0, 0, 1023), (1, 1024, 2047), (2, 2048, 2099)]
    assert all(g.phase == DECODE and g.every_position and g.first_position == 0 for g in wide)
    scored = [p + 1 for g in wide for p in range(g.start + SKIP, g.stop)]
    assert scored == [g.next_index for g in step]
    assert list(wide_graphs(1025, 1024))[-1].stop == 1023


def test_windows_of_a_long_text():
    with Engines(None, {"n_threads": THREADS, "n_ctx": 16}) as short:
        tokens = short.get().tokenize(TEXT[:40])
        (score,) = score_texts(short, [cell_of("2cycles")], [Text("t", tokens)])
        assert len(score.losses[0]) == 7 + 7
        (wide,) = score_texts(short, [cell_of("2cycles")], [Text("t", tokens)], wide=True)
        assert np.abs(wide.losses[0] - score.losses[0]).mean() < 0.02
        with pytest.raises(InputError, match="--ubatch 8: --wide needs 16 or more here"):
            ppl.widen(short, [Text("t", tokens)], 8)


def test_the_throw_away_decode_is_replayed_and_not_counted(engines, tmp_path):
    engine, cell = engines.get(), cell_of("2cycles", "substitute:L=.1")
    tokens = engine.tokenize(TEXT[:24])
    engine.start(cell)
    with TraceWriter(tmp_path / "t.trace", engine.header(cell), 8) as writer:
        recorder = Recorder(writer)
        engine.throw_away_decode(recorder)
        engine.score(tokens, recorder)
        recorder.flush()
    trace = open_trace(tmp_path / "t.trace")
    first = trace.tokens.collect().row(0, named=True)
    assert (first["turn"], first["phase"], first["step"], first["token"]) == (THROW_AWAY_TURN, 0, 0, 0)
    assert first["lookups"] > 0
    live, simulated = measure(trace, cell), replay(trace, cell)
    for name in ("lookups", "hits", "misses", "substituted", "evictions", "slots", "tokens", "cold_misses"):
        assert getattr(live.all, name) == getattr(simulated.all, name), name
    assert live.all.tokens == len(tokens) - 1
    # One item's counts add up to what its trace measures.
    assert live.provenance is not None
    counts = [scoring.counts_of(trace, cell, set())]
    added = cell_numbers(cell, trace.header, counts, live.provenance, live.nll)
    assert added.decode == live.decode
    assert added.all == live.all
    assert added.tok_s == pytest.approx(live.tok_s)


def test_several_texts_and_a_width(engines):
    tokens = engines.get().tokenize(TEXT[:60])
    texts = [Text("a", tokens[:30]), Text("b", tokens[30:])]
    cells = [cell_of("2cycles"), cell_of("2cycles", "top_k:k=4")]
    told: list[float] = []
    scores = score_texts(engines, cells, texts, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1
    assert [(s.numbers.top_k, s.text) for s in scores] == [
        (8, "a"), (8, "b"), (8, None), (4, "a"), (4, "b"), (4, None),
    ]  # fmt: skip
    a, b, both = scores[3:]
    assert [x.tolist() for x in both.losses] == [a.losses[0].tolist(), b.losses[0].tolist()]
    assert both.numbers.decode.lookups == a.numbers.decode.lookups + b.numbers.decode.lookups
    assert both.difference == pytest.approx((a.difference + b.difference) / 2)
    assert both.numbers.decode.slots == 4 * 8 * both.numbers.decode.tokens


def test_ppl_as_a_user_meets_it(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT[:30])
    command = ["ppl", "--text", text, "--budget", "2cycles", "--margin", "0,.1", "--threads", THREADS]
    assert main([*map(str, command), "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [(c["margin"], c["mode"], c["source"]) for c in cells] == [
        (0.0, "step", "live"),
        (0.1, "step", "live"),
    ]
    assert cells[0]["ppl_ratio"] == 1
    assert cells[1]["ppl_ratio"] == pytest.approx(cells[1]["ppl"] / cells[0]["ppl"])
    low, high = cells[1]["nll_difference_interval"]
    assert low <= cells[1]["nll_difference"] <= high
    assert main([*map(str, command), "--wide"]) == 0
    assert "next-token hit %" in capsys.readouterr().out
    text.write_bytes(TEXT[:9])
    assert "at least 10 are needed" in failed(capsys, command)
    assert "is named twice" in failed(capsys, [*command[:3], text, *command[3:]])
    assert "No such file" in failed(capsys, ["ppl", "--text", tmp_path / "none", "--budget", "2cycles"])


# -- choices ----------------------------------------------------------------------------------------------


def _write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BYTES = {"subject": "bytes", "question": "Next?", "choices": ["a", "b"], "answer": "B", "prompt": "The modul"}
BYTES |= {"options": ["x", "e"]}
MMLU = {"subject": "anatomy", "question": "Where?", "choices": ["here", "there", "up", "down"], "answer": 2}


def test_the_prompt_of_tiny_mmlu(tmp_path):
    (item,) = read_items(_write(tmp_path / "i.jsonl", MMLU))
    assert item.prompt == (
        "The following is a multiple choice question about anatomy.\n\n"
        "Where?\nA. here\nB. there\nC. up\nD. down\nAnswer:"
    )
    assert item.options == [" A", " B", " C", " D"]
    assert item.answer == 2
    pl.DataFrame([MMLU, MMLU | {"answer": 3}]).write_parquet(tmp_path / "i.parquet")
    rows = read_items(tmp_path / "i.parquet")
    assert rows[0][1:] == item[1:]
    assert rows[1].answer == 3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"answer": "E"}, "'answer' is 'E', must be a letter A to D or an index 0 to 3"),
        ({"answer": 4}, "'answer' is 4"),
        ({"answer": True}, "'answer' is True"),
        ({"choices": ["one"]}, "'choices' must be a list"),
        ({"subject": None}, "'subject' is missing"),
        ({"options": ["a", "b"]}, "'options' must be one"),
        ({"prompt": ""}, "'prompt' must be"),
    ],
)
def test_items_that_are_none_are_named(tmp_path, change, word):
    path = _write(tmp_path / "i.jsonl", MMLU, MMLU | change)
    with pytest.raises(InputError, match=r"i\.jsonl line 2: ") as caught:
        read_items(path)
    assert word in str(caught.value)


def test_files_that_hold_no_items(tmp_path):
    for name, data, word in (
        ("i.csv", b"", "must end in"),
        ("i.jsonl", b"", "has no items"),
        ("j.jsonl", b"{", "line 1: not JSON"),
        ("k.jsonl", b"[1]", "is not an object"),
        ("l.jsonl", b"\xff", "not UTF-8"),
        ("i.parquet", b"x", "is not parquet"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=word):
            read_items(tmp_path / name)
    with pytest.raises(InputError, match="no such file"):
        read_items(tmp_path / "none.jsonl")


def test_options_must_differ_in_their_first_token(engines, tmp_path):
    # A byte vocabulary: " A" and " B" both begin with the space.
    (item,) = read_items(_write(tmp_path / "i.jsonl", MMLU))
    with pytest.raises(InputError, match=r"i\.jsonl line 1: options .* do not differ in their first token"):
        tokenise(item, engines.get())
    with pytest.raises(InputError, match="do not fit a context of 2048"):
        tokenise(item._replace(prompt="x" * 2100, options=["a", "b", "c", "d"]), engines.get())


def test_an_answer_is_the_likeliest_first_token(engines, tmp_path):
    items = read_items(
        _write(tmp_path / "i.jsonl", BYTES, BYTES | {"prompt": "The modules of the standard li"})
    )
    (answers,) = answer_items(engines, [cell_of("2cycles")], items)
    golden = []
    for item in items:
        tokens, first = tokenise(item, engines.get())
        # Plain llama.cpp's last graph is scored on the token after the one it holds.
        row = plain_logits([*tokens, 0])[-1]
        golden.append(int(np.argmax([row[t] for t in first])))
    assert answers.predictions == golden
    assert answers.correct == [p == 1 for p in golden]
    assert answers.identical == 2
    assert answers.outcome == (0, 0, 1.0)
    assert answers.numbers.decode.tokens == sum(len(i.prompt) - SKIP for i in items)


def test_a_prompt_is_decoded_to_its_end():
    plans = prompt_graphs(11, 3, 4)
    assert [(p.start, p.stop, p.phase) for p in plans] == [
        (0, 4, 0),
        (4, 8, 0),
        (8, 9, 1),
        (9, 10, 1),
        (10, 11, 1),
    ]
    assert prompt_graphs(3, 0, 512)[-1].wants_output


def test_choices_as_a_user_meets_them(tmp_path, capsys):
    path = _write(tmp_path / "i.jsonl", BYTES, BYTES | {"answer": 0})
    command = ["choices", "--items", path, "--budget", "2cycles", "--margin", "0,.15", "--threads", THREADS]
    assert main([*map(str, command), "--json"]) == 0
    first, other = json.loads(capsys.readouterr().out)
    assert first["items"] == first["identical_predictions"] == 2
    assert first["correct"] == 1
    assert first["mcnemar_p"] == 1
    assert len(other["predictions"]) == 2
    assert main([str(a) for a in command]) == 0
    assert "McNemar p" in capsys.readouterr().out
    _write(path, BYTES, MMLU)
    assert "i.jsonl line 2: options" in failed(capsys, command)


def test_the_shipped_items(engines, tmp_path):
    items = read_items(ITEMS)
    assert len(items) == 100
    questions = [tokenise(item, engines.get()) for item in items]
    assert all(build_items._SHORTEST_CONTEXT <= len(q.tokens) <= build_items.CONTEXT_BYTES for q in questions)
    assert {i.answer for i in items} == {0, 1, 2, 3}
    text = build_items._ascii(build_items.DATA / "text-b.txt")
    assert all(i.prompt + i.options[i.answer] in text for i in items[: build_items.N_OF_SHORT])


def test_the_builder_is_deterministic_and_starts_with_the_shipped_texts(tmp_path):
    heldout = tmp_path / "heldout.txt"
    heldout.write_bytes(TEXT * 3 + (b"many other words of a longer text, under another heading " * 200))
    build_items.main(str(tmp_path / "a.jsonl"), str(heldout))
    build_items.main(str(tmp_path / "b.jsonl"), str(heldout))
    built = (tmp_path / "a.jsonl").read_text().splitlines()
    assert built == (tmp_path / "b.jsonl").read_text().splitlines()
    assert built[:20] == ITEMS.read_text().splitlines()[:20]
    assert len(built) == 100


# -- resuming ---------------------------------------------------------------------------------------------


def test_results_come_back_and_a_torn_line_does_not(tmp_path):
    path, asked = tmp_path / "r.jsonl", {"score": "ppl", "cells": [["substitute", {"L": 0.1}]]}
    with Results(path, asked) as results:
        results.add(0, 0, {"x": 0.1})
        results.add(0, 1, {"x": None})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"cell": 1, "item": 0, "ans')
    with Results(path, asked) as results:
        assert path.read_bytes() == whole
        assert results.get(1, 0) is None
        assert results.of_cell(0, 2) == [{"x": 0.1}, {"x": None}]
        results.add(1, 0, {"x": 2})
    with Results(path, asked) as results:
        assert results.get(1, 0) == {"x": 2}
    with pytest.raises(InputError, match=r"r\.jsonl: holds results of another run \(cells differ\)"):
        Results(path, asked | {"cells": []})
    path.write_bytes(whole + b"[]\n")
    with pytest.raises(InputError, match="line 4 is not a line of a results file"):
        Results(path, asked)
    path.write_bytes(b'{"finger')
    with Results(path, asked) as results:
        assert results.get(0, 0) is None
    with pytest.raises(InputError, match="Is a directory"):
        Results(tmp_path, asked)


def test_a_resumed_score_is_that_of_an_uninterrupted_one(engines, tmp_path, monkeypatch):
    cells = [cell_of("2cycles"), cell_of("2cycles", "drop_cold:F=.5")]
    rows = [BYTES | {"prompt": TEXT[at : at + 20].decode()} for at in (0, 50, 100, 150)]
    items = read_items(_write(tmp_path / "i.jsonl", *rows))
    whole = answer_items(engines, cells, items)
    asked = {"a": 1}
    ran = []
    original = choices.prompt_graphs

    def counted(n_tokens, turn, n_ubatch):
        ran.append(turn)
        if len(ran) == 7:
            raise KeyboardInterrupt
        return original(n_tokens, turn, n_ubatch)

    monkeypatch.setattr(choices, "prompt_graphs", counted)
    with Results(tmp_path / "r.jsonl", asked) as results, pytest.raises(KeyboardInterrupt):
        answer_items(engines, cells, items, results=results)
    with Results(tmp_path / "r.jsonl", asked) as results:
        resumed = answer_items(engines, cells, items, results=results)
    # Four of the first cell, two of the second, the killed one; then the last finished again, and the rest.
    assert ran == [0, 1, 2, 3, 0, 1, 2, 1, 2, 3]
    for a, b in zip(whole, resumed, strict=True):
        assert a.predictions == b.predictions
        assert a.numbers.decode == b.numbers.decode
        assert a.numbers.all == b.numbers.all


@pytest.mark.slow
def test_kill_9_and_again(tmp_path, capsys):
    texts = []
    for number, n in enumerate((14, 16, 18)):
        texts.append(tmp_path / f"{number}.txt")
        texts[-1].write_bytes(TEXT[:n])
    results = tmp_path / "r.jsonl"
    command = [
        "ppl",
        "--text",
        *texts,
        "--budget",
        "2cycles",
        "--margin",
        "0,.1,.15",
        "--threads",
        THREADS,
    ]
    command = [str(word) for word in command]
    process = subprocess.Popen(
        [sys.executable, "-m", "simlab", *command, "--resume", results],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while (
            not (results.exists() and results.read_bytes().count(b"\n") > 2) and time.monotonic() < deadline
        ):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    kept = results.read_bytes()
    assert main([*command, "--resume", str(results), "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    whole_lines = kept[: kept.rfind(b"\n") + 1]
    assert results.read_bytes().startswith(whole_lines)
    assert main([*command, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [(c["text"], c["nll"], c["decode"]) for c in resumed] == [
        (c["text"], c["nll"], c["decode"]) for c in again
    ]
    assert "(policy differ)" in failed(capsys, [*command, "--resume", results, "--drop", "0.1"])
