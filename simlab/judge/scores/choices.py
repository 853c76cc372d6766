"""`simlab choices`: multiple-choice questions answered under each cell.

A question is one step-mode pass over its whole prompt, decoded token by token under the policy. The answer
is the option whose first token is the likeliest after it, over the full vocabulary. The context is cleared
between questions; the expert cache stays, as it does in a conversation. A session opens with a throw-away
decode. Rules: engine-semantics, section 5.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from simlab.errors import InputError
from simlab.judge.scores.scoring import (
    Engines,
    ItemAnswer,
    Results,
    Tick,
    cell_numbers,
    cells_table,
    fingerprint,
    open_cells,
    outcome_words,
    run_cells,
)
from simlab.judge.stats import Interval, PairedOutcome, paired_outcome, wilson
from simlab.record.engine import Engine
from simlab.record.llama import log_probability
from simlab.record.plan import SKIP, PlannedGraph, chunks
from simlab.record.recorder import Recorder
from simlab.trace.provenance import text_digest
from simlab.types import DECODE, Cell, CellNumbers

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Item(NamedTuple):
    """One question. `options` are continuations of `prompt`, of which the one at `answer` is right."""

    name: str
    """Where it stands: file and number."""
    prompt: str
    options: list[str]
    answer: int


class Question(NamedTuple):
    """An item as token ids: its prompt, and the first token of each option."""

    tokens: list[int]
    option_tokens: list[int]


@dataclass(frozen=True)
class Answers:
    """One cell's answers to all items."""

    numbers: CellNumbers
    predictions: list[int]
    """Per item, the option chosen."""
    correct: list[bool]
    interval: Interval
    """Of the accuracy."""
    outcome: PairedOutcome
    """Flips against the first cell."""
    identical: int
    """Items on which it chose the option that the first cell chose."""

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)


# ---------------------------------------------------------------------------------------------------------
# Items


def read_items(path: str | Path) -> list[Item]:
    """Items of a JSONL or parquet file with subject, question, choices and answer (an index or a letter).

    Two fields are optional: `prompt` replaces the usual prompt, `options` the usual ` A`, ` B`, ...

    Raises:
        InputError: no such file, or an item that is not one, by file and line or row.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"--items {path}: the name must end in .jsonl or .parquet")
    if not path.is_file():
        raise InputError(f"--items {path}: no such file")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    items = [_item(name, row) for name, row in rows]
    if not items:
        raise InputError(f"--items {path}: has no items")
    return items


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"--items {path}: is not UTF-8 text (byte {error.start})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name = f"{path} line {number}"
            try:
                yield name, json.loads(line)
            except ValueError as error:
                raise InputError(f"--items {name}: not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import polars as pl

    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"--items {path}: is not parquet: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(frame.iter_rows(named=True)):
        yield f"{path} row {number}", row


def _item(name: str, row: Any) -> Item:
    if not isinstance(row, dict):
        raise InputError(f"--items {name}: is not an object with subject, question, choices and answer")
    for field in ("subject", "question", "choices", "answer"):
        if row.get(field) is None:
            raise InputError(f"--items {name}: '{field}' is missing")
    choices = row["choices"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
        raise InputError(f"--items {name}: 'choices' must be a list of 2 to {len(_LETTERS)}")
    letters = _LETTERS[: len(choices)]
    answer = row["answer"]
    if isinstance(answer, str) and len(answer.strip()) == 1:
        answer = letters.find(answer.strip().upper())
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise InputError(
            f"--items {name}: 'answer' is {row['answer']!r}, must be a letter A to {letters[-1]} "
            f"or an index 0 to {len(choices) - 1}"
        )
    options = row.get("options")
    if options is None:
        options = [f" {letter}" for letter in letters]
    if not isinstance(options, list) or len(options) != len(choices) or not all(map(_is_text, options)):
        raise InputError(f"--items {name}: 'options' must be one non-empty string for each choice")
    prompt = row.get("prompt")
    if prompt is None:
        listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(letters, choices, strict=True))
        prompt = (
            f"The following is a multiple choice question about {row['subject']}.\n\n"
            f"{row['question']}\n{listed}Answer:"
        )
    if not _is_text(prompt):
        raise InputError(f"--items {name}: 'prompt' must be a non-empty string")
    return Item(name, prompt, options, answer)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def tokenise(item: Item, engine: Engine) -> Question:
    """An item as token ids.

    Raises:
        InputError: options that begin with the same token, a prompt whose end joins an option in one token,
            or one longer than the context.
    """
    tokens = engine.tokenize(item.prompt)
    first = []
    for option in item.options:
        whole = engine.tokenize(item.prompt + option)
        if len(whole) <= len(tokens) or whole[: len(tokens)] != tokens:
            raise InputError(
                f"--items {item.name}: option {option!r} changes the tokens of the prompt's end; "
                "end the prompt elsewhere"
            )
        first.append(whole[len(tokens)])
    if len(set(first)) < len(first):
        raise InputError(
            f"--items {item.name}: options {item.options} do not differ in their first token; "
            "give the item 'options' that do"
        )
    if len(tokens) > engine.window:
        raise InputError(
            f"--items {item.name}: {len(tokens)} tokens do not fit a context of {engine.window}; raise --ctx"
        )
    return Question(tokens, first)


# ---------------------------------------------------------------------------------------------------------
# Answering


def prompt_graphs(n_tokens: int, turn: int, n_ubatch: int) -> list[PlannedGraph]:
    """Step mode through a whole prompt: a short prefill, then a graph per token, the last one included."""
    skip = min(SKIP, n_tokens)
    return [
        *chunks(turn, 0, skip, 0, n_ubatch),
        *(PlannedGraph(turn, DECODE, at, at + 1, at, True, None) for at in range(skip, n_tokens)),
    ]


def answer_items(
    engines: Engines,
    cells: Sequence[Cell],
    items: Sequence[Item],
    *,
    results: Results | None = None,
    progress: Tick | None = None,
) -> list[Answers]:
    """Answer every item under every cell; flips are against the first cell.

    Raises:
        InputError: an item that `tokenise` refuses, before anything runs.
    """
    engine = engines.for_cell(cells[0])
    header = engine.header()
    questions = [tokenise(item, engine) for item in items]

    def run(engine: Engine, recorder: Recorder | None, at: int, tick: Tick) -> ItemAnswer:
        tokens, option_tokens = questions[at]
        engine.forget_context()
        logits = None
        for plan in prompt_graphs(len(tokens), at, engine.n_ubatch):
            logits = engine.run_graph(plan, tokens[plan.start : plan.stop], None, recorder).logits
            tick(plan.stop / len(tokens))
        assert logits is not None
        scores = [log_probability(logits, token) for token in option_tokens]
        return {"prediction": scores.index(max(scores)), "log_probabilities": scores}

    results = results or Results(None, {})
    run_cells(engines, cells, len(items), run, results, keep_cache=True, warm_up=True, progress=progress)
    answered = [results.of_cell(at, len(items)) for at in range(len(cells))]
    predictions = [[a["prediction"] for a in answers] for answers in answered]
    correct = [[p == i.answer for p, i in zip(chosen, items, strict=True)] for chosen in predictions]
    return [
        Answers(
            cell_numbers(
                cell, header, [a["counts"] for a in answered[at]], engines.provenance(cell, _digest(items))
            ),
            predictions[at],
            correct[at],
            wilson(sum(correct[at]), len(items)),
            paired_outcome(correct[0], correct[at]),
            sum(a == b for a, b in zip(predictions[0], predictions[at], strict=True)),
        )
        for at, cell in enumerate(cells)
    ]


def _digest(items: Sequence[Item]) -> str:
    return text_digest([[i.prompt, i.options, i.answer] for i in items])


# ---------------------------------------------------------------------------------------------------------
# The command


def to_json(answers: Answers) -> dict[str, Any]:
    """A cell in the contract's form, with the keys of this score."""
    from simlab.cli.output import cell_to_json, json_value

    added = {
        "items": len(answers.correct),
        "correct": sum(answers.correct),
        "accuracy": answers.accuracy,
        "accuracy_interval": answers.interval,
        "flips_to_wrong": answers.outcome.to_wrong,
        "flips_to_right": answers.outcome.to_right,
        "mcnemar_p": answers.outcome.p_value,
        "identical_predictions": answers.identical,
        "predictions": answers.predictions,
    }
    return cell_to_json(answers.numbers) | json_value(added)


def answer_table(answers: Sequence[Answers]) -> str:
    """Answers for reading, one line per cell."""
    rows = [
        (
            a.numbers,
            [
                f"{sum(a.correct)}/{len(a.correct)}",
                f"{100 * a.accuracy:.1f}",
                *outcome_words(a.interval, a.outcome),
                f"{a.identical}/{len(a.correct)}",
            ],
        )
        for a in answers
    ]
    head = ["correct", "accuracy %", "95 %", "to wrong", "to right", "McNemar p", "identical"]
    return cells_table(head, rows)


def choices_command(args: argparse.Namespace) -> None:
    """`simlab choices`."""
    from simlab.cli.options import engine_options
    from simlab.cli.output import Progress, print_json

    items = read_items(args.items)
    options = engine_options(args)
    with Engines(args.model, options) as engines:
        cells, _ = open_cells(args, engines)
        asked = fingerprint("choices", engines, _digest(items), cells, options)
        with Results(args.resume, asked) as results, Progress("choices") as progress:
            answers = answer_items(engines, cells, items, results=results, progress=progress)
    print_json([to_json(a) for a in answers]) if args.json else print(answer_table(answers))
