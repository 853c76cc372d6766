"""Builds `simlab/data/choices-100.jsonl`: which word comes next, of four that begin differently.

The embedded model reads bytes and knows nothing of the world, so its items come from held-out text: a
context of about 180 bytes that ends before a word, the true word, and three other words of the same text.
The same file comes out again, byte for byte, with

    python -m simlab.judge.scores.build_items OUT.jsonl simlab/data/heldout.txt
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "data"
SHORT_TEXTS = ("text-b.txt", "text-c.txt")
N_OF_SHORT = 10
"""Items from each shipped text; the rest comes from the long one."""
N_ITEMS = 100
N_CHOICES = 4
SEED = 20261130
CONTEXT_BYTES = 180
_SHORTEST_CONTEXT = 150
_WORD = re.compile(r"(?<= )[A-Za-z]{4,12}\b")


def items_of(text: str, subject: str, n: int, generator: np.random.Generator) -> Iterator[dict[str, Any]]:
    """`n` items of a text, one from each of `n` equal stretches of it.

    Raises:
        ValueError: a stretch has no word with a context before it, or the text too few words.
    """
    words = [m for m in _WORD.finditer(text) if m.start() >= CONTEXT_BYTES]
    vocabulary = sorted({m.group() for m in words})
    edges = np.linspace(CONTEXT_BYTES, len(text), n + 1)
    for low, high in itertools.pairwise(edges):
        here = [m for m in words if low <= m.start() < high]
        if not here:
            raise ValueError(f"{subject}: no word between characters {low:.0f} and {high:.0f}")
        yield _item(text, here[generator.integers(len(here))], vocabulary, subject, generator)


def _item(
    text: str, word: re.Match[str], vocabulary: list[str], subject: str, generator: np.random.Generator
) -> dict[str, Any]:
    start = word.start() - CONTEXT_BYTES
    # From the start of a word or line, so that the context does not begin inside one.
    gap = re.search(r"\s", text[start : word.start() - _SHORTEST_CONTEXT])
    context = text[start + (gap.end() if gap else 0) : word.start()]
    choices, taken = [word.group()], {word.group()[0].lower()}
    for at in generator.permutation(len(vocabulary)):
        if len(choices) < N_CHOICES and vocabulary[at][0].lower() not in taken:
            choices.append(vocabulary[at])
            taken.add(vocabulary[at][0].lower())
    if len(choices) < N_CHOICES:
        raise ValueError(f"{subject}: too few words that begin differently")
    order = generator.permutation(N_CHOICES)
    shuffled = [choices[i] for i in order]
    return {
        "subject": subject,
        "question": "Which word comes next?",
        "choices": shuffled,
        "answer": int(np.flatnonzero(order == 0)[0]),
        "prompt": context,
        "options": shuffled,
    }


def build(heldout: Path) -> list[dict[str, Any]]:
    """All items, in order: text-b, text-c, then the long held-out text without those two in it."""
    generator = np.random.default_rng(SEED)
    items: list[dict[str, Any]] = []
    long_text = _ascii(heldout)
    for name in SHORT_TEXTS:
        text = _ascii(DATA / name)
        items += items_of(text, name, N_OF_SHORT, generator)
        long_text = long_text.replace(text, "\n\n")
    items += items_of(long_text, heldout.name, N_ITEMS - len(items), generator)
    return items


def _ascii(path: Path) -> str:
    """A text with bytes outside ASCII as question marks: one character is then one byte, and one token."""
    return path.read_bytes().decode("ascii", errors="replace").replace("�", "?")


def main(out: str, heldout: str) -> None:
    """Write the items, one JSON object a line."""
    lines = [json.dumps(item) + "\n" for item in build(Path(heldout))]
    Path(out).write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} OUT.jsonl HELDOUT.txt")
    main(*sys.argv[1:])
