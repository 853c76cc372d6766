"""Live recordings of many texts under many cells, kept in a folder so that a grid can be stopped and gone on with.

One trace per (text, cell). What was recorded before is opened again, after its header was compared with what is asked
for; one that a kill cut short is recorded anew. A speed taken from these runs is that of a recorded run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from simlab.cells import route_spec
from simlab.errors import InputError
from simlab.judge.scores.ppl import LEAST_TOKENS, Text
from simlab.judge.scores.scoring import Engines, Tick
from simlab.record.engine import Engine
from simlab.trace.header import read_header
from simlab.trace.provenance import OF_RUN, check
from simlab.trace.store import Trace, open_trace
from simlab.types import Cell

PROMPT_TOKENS = 64
"""Of a text, what the model writes on from."""
_UNFIT = re.compile(r"[^A-Za-z0-9.=,+-]+")
"""What does not go into a folder's name."""


def read_texts(
    engines: Engines, paths: Sequence[str], n_tokens: int, stretches: Sequence[int] = (1,)
) -> list[Text]:
    """The first tokens of each file, or of several stretches of it, evenly spread from its start.

    Args:
        n_tokens: most tokens of a text.
        stretches: texts made of each file, or one number for all; of a file of several, texts are named `stem-1`,
            `stem-2`, ...

    Raises:
        InputError: a file that cannot be read, is too short for so many stretches, or is named like another; more
            or fewer numbers than files.
    """
    texts: dict[str, Text] = {}
    if len(stretches) not in (1, len(paths)):
        raise InputError(
            f"--stretches: has {len(stretches)} numbers for {len(paths)} files; give one, or one a file"
        )
    for path, n in zip(paths, list(stretches) * (len(paths) // len(stretches)), strict=True):
        try:
            ids = engines.get().tokenize(Path(path).read_bytes())
        except OSError as error:
            raise InputError(f"--text {path}: {error.strerror}") from error
        if len(ids) < LEAST_TOKENS:
            raise InputError(f"--text {path}: has {len(ids)} tokens, at least {LEAST_TOKENS} are needed")
        if n > 1 and len(ids) // n < n_tokens:
            raise InputError(
                f"--text {path}: its {len(ids)} tokens do not hold {n} stretches of {n_tokens}; ask for fewer"
            )
        for i in range(n):
            start = i * len(ids) // n
            name = Path(path).stem + (f"-{i + 1}" if n > 1 else "")
            if name in texts:
                raise InputError(f"--text {path}: another text is called {name} too; rename one")
            texts[name] = Text(name, engines.get().windowed(ids[start : start + n_tokens])[:n_tokens])
    return list(texts.values())


@dataclass(frozen=True)
class RunStore:
    """A folder of recordings."""

    folder: Path
    engines: Engines

    def record(
        self, texts: Sequence[Text], cells: Sequence[Cell], progress: Tick | None = None
    ) -> list[list[Trace]]:
        """Score every text under every cell that the folder lacks, token by token, and open all recordings.

        Returns the traces, per cell one of each text. Each run starts from an empty cache and an empty context.

        Raises:
            InputError: the folder holds another recording under a name that is wanted.
        """

        return self._run(texts, cells, self._record_text, progress)

    def record_again(
        self, texts: Sequence[Text], cells: Sequence[Cell], progress: Tick | None = None
    ) -> list[list[Trace]]:
        """As `record`, a second time with another token first, which nothing is counted of.

        What the later tokens have in common with the first run is all that matters of them, so how far two such runs
        are apart is chance, and no replay can be told to be closer than that to one of them.
        """
        head = 0 if self.engines.get().bos is None else 1
        changed = [text._replace(tokens=_another(text.tokens, head)) for text in texts]
        return self._run(changed, cells, self._record_text, progress, "again")

    def _record_text(self, text: Text, cell: Cell, out: Path, tick: Tick) -> None:
        engine = self.engines.for_cell(cell)
        engine.record_text(text.tokens, cell, out, text=engine.detokenize(text.tokens), progress=tick)

    def generate(
        self, texts: Sequence[Text], cells: Sequence[Cell], progress: Tick | None = None
    ) -> list[list[Trace]]:
        """As `record`, but the model writes: after the first `PROMPT_TOKENS` of a text, as many as the text has left.

        Greedy, and shorter where the model ends by itself or its context is full.
        """

        def run(text: Text, cell: Cell, out: Path, tick: Tick) -> None:
            engine = self.engines.for_cell(cell)
            prompt, (n,) = _tokens(text, "free", engine)
            whole = engine.detokenize(text.tokens)
            engine.record_generation([prompt], n, cell, out, text=whole, progress=tick)

        for text in texts:
            if len(text.tokens) <= PROMPT_TOKENS:
                raise InputError(
                    f"--text {text.name}: has {len(text.tokens)} tokens; writing on from {PROMPT_TOKENS} wants more"
                )
        return self._run(texts, cells, run, progress, "free")

    def _run(
        self,
        texts: Sequence[Text],
        cells: Sequence[Cell],
        run: Callable[[Text, Cell, Path, Tick], None],
        progress: Tick | None,
        how: str = "forced",
    ) -> list[list[Trace]]:
        header = self.engines.get().header()
        missing = [(text, cell) for cell in cells for text in texts if not self._kept(text, cell, how)]
        # Cells of equal width together: each change opens the model again.
        missing.sort(key=lambda pair: self.engines.top_k(pair[1].route) or header.n_expert_used)
        total, done = sum(len(text.tokens) for text, _ in missing), 0
        for text, cell in missing:
            out = self.path(text, cell, how)
            out.parent.mkdir(parents=True, exist_ok=True)

            def tick(share: float, done: int = done, text: Text = text) -> None:
                if progress is not None:
                    progress((done + share * len(text.tokens)) / total)

            run(text, cell, out, tick)
            done += len(text.tokens)
        return [[open_trace(self.path(text, cell, how)) for text in texts] for cell in cells]

    def path(self, text: Text, cell: Cell, how: str = "forced") -> Path:
        """Where the recording of a text under a cell lies."""
        words = (
            cell.budget.text,
            route_spec(cell.route),
            cell.evict_spec,
            cell.scope,
            *(() if how == "forced" else (how,)),
        )
        return self.folder / text.name / ("_".join(_UNFIT.sub("-", word) for word in words) + ".trace")

    def _kept(self, text: Text, cell: Cell, how: str) -> bool:
        """Whether the run was recorded before; one that did not finish is removed."""
        path = self.path(text, cell, how)
        if not path.exists():
            return False
        header = read_header(path).header
        if not header.complete:
            shutil.rmtree(path)
            return False
        engine = self.engines.for_cell(cell)
        now = engine.header(cell, tokens=_tokens(text, how, engine)).provenance
        assert now is not None
        check(
            header.provenance, now, OF_RUN, str(path), "the run asked for", "name another folder with --keep"
        )
        return True


def _tokens(text: Text, how: str, engine: Engine) -> list[list[int]]:
    """What `Engine.header` is given as the tokens of a run: of free generation the prompt, and how many to make."""
    if how != "free":
        return [text.tokens]
    prompt = text.tokens[:PROMPT_TOKENS]
    return [prompt, [min(len(text.tokens), engine.n_ctx) - len(prompt)]]


def _another(tokens: Sequence[int], at: int) -> list[int]:
    """A text with the next token of it that is another at place `at`; of a text of one token over and over, itself."""
    other = next((token for token in tokens[at:] if token != tokens[at]), tokens[at])
    return [*tokens[:at], other, *tokens[at + 1 :]]
