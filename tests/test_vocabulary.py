"""What a vocabulary asks for: a BOS at the head of every window, and tokens longer than a buffer."""

from __future__ import annotations

from pathlib import Path

import gguf
import polars as pl
import pytest
from tiny_models import make_model

from simlab.cli.main import main
from simlab.judge.fidelity.runs import _another, read_texts
from simlab.judge.scores.ppl import read_texts as read_scored_texts
from simlab.judge.scores.scoring import Engines
from simlab.record.llama import Llama
from simlab.trace.store import open_trace

_BOS = 1
_LONG = "x" * 300
"""The text of token 3 + ord('A')."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that adds a BOS and has a token of 300 bytes."""
    real = gguf.GGUFWriter.add_token_list, gguf.GGUFWriter.add_token_types, gguf.GGUFWriter.add_add_bos_token
    at = 3 + ord("A")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf.GGUFWriter,
            "add_token_list",
            lambda w, tokens: real[0](w, [*tokens[:at], _LONG, *tokens[at + 1 :]]),
        )
        normal = gguf.TokenType.NORMAL
        patch.setattr(
            gguf.GGUFWriter,
            "add_token_types",
            lambda w, types: real[1](w, [*types[:at], normal, *types[at + 1 :]]),
        )
        patch.setattr(gguf.GGUFWriter, "add_add_bos_token", lambda w, _: real[2](w, True))
        return make_model(tmp_path_factory.mktemp("model"), "split")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """40 bytes, each a token."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(97, 117)) * 2)
    return path


_FIRST = [3 + byte for byte in range(97, 117)] * 2
_WINDOWS = [[_BOS, *_FIRST[:15]], [_BOS, *_FIRST[15:30]], [_BOS, *_FIRST[30:]]]


def record(model: Path, text: Path, *options: str) -> list[list[int]]:
    """The token ids of each turn of a recording with a context of 16."""
    out = text.with_suffix(".trace")
    words = ["--text", str(text), "--budget", "100%", "--ctx", "16", "--out", str(out), "--force", *options]
    assert main(["record", str(model), *words]) == 0
    rows = open_trace(out).routing.filter(pl.col("layer") == 0)
    return rows.group_by("turn", maintain_order=True).agg("token").collect()["token"].to_list()


def test_a_token_longer_than_the_buffer(model: Path) -> None:
    llama = Llama(model, n_threads=1)
    assert llama.detokenize([3 + ord("b"), 3 + ord("A"), 3 + ord("c")]) == b"b" + _LONG.encode() + b"c"
    llama.close()


def test_every_window_begins_with_a_bos(model: Path, text: Path) -> None:
    # The last token of a window is not evaluated, as nothing is scored on it, but for a window that is all prefill.
    assert record(model, text) == [window[:-1] for window in _WINDOWS]
    with Engines(model, {"n_ctx": 16, "n_threads": 1}) as engines:
        engine = engines.get()
        assert read_scored_texts([str(text)], engine)[0].tokens == [t for window in _WINDOWS for t in window]
        # A stretch from the middle of a file is a text like any other.
        first, second = read_texts(engines, [str(text)], 18, (2,))
        assert first.tokens == [*_WINDOWS[0], _BOS, _FIRST[15]]
        assert second.tokens[:16] == [_BOS, *(engine.tokenize(text.read_bytes())[20:35])]


def test_another_first_token_is_not_another_bos() -> None:
    assert _another([1, 7, 7, 8], 1) == [1, 8, 7, 8]
    assert _another([7, 7, 8], 0) == [8, 7, 8]
    assert _another([1, 7, 7], 1) == [1, 7, 7]


def test_a_text_is_cut(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(model, text, "--tokens", "20") == [_WINDOWS[0][:-1], _WINDOWS[1][:4]]
    cut = open_trace(text.with_suffix(".trace")).header.text_hash
    text.write_bytes(text.read_bytes()[:18])
    assert record(model, text) == [_WINDOWS[0][:-1], _WINDOWS[1][:4]]
    assert open_trace(text.with_suffix(".trace")).header.text_hash == cut
    words = ["record", "--prompt", "x", "-n", "1", "--tokens", "9", "--out", str(text.with_suffix(".new"))]
    assert main(words) == 2
    assert "--tokens: goes with --text" in capsys.readouterr().err
