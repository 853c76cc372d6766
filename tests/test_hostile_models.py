"""GGUF files whose headers lie are refused in one line, even where llama.cpp dies of them."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_models import make_model

from simlab.cli.main import main
from simlab.record.engine import Engine

_U32 = 4
_VALUES = (0, 1, 9, 513, 2**31 - 1, 2**31, 2**32 - 1)
_KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "expert_count", "expert_used_count", "expert_feed_forward_length",
)  # fmt: skip
_FATAL = ("block_count=0", "context_length=2147483648", "expert_count=1", "expert_used_count=9")
"""One of each kind that ended the process: by an assertion of llama.cpp, and by writing outside its memory."""
_HARMLESS = ("context_length=", "feed_forward_length=", "expert_used_count=1")
"""Other numbers, with which the model is as good a model."""


class Lie(NamedTuple):
    """One number of a header changed."""

    name: str
    offset: int
    data: bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_model(tmp_path_factory.mktemp("model"), "split").read_bytes()


def lies(model: bytes) -> Iterator[Lie]:
    """Every number of the metadata, of the file's own counts and of one tensor's entry, at its extremes."""
    for key in _KEYS:
        name = f"qwen3moe.{key}".encode()
        at = model.index(name) + len(name)
        assert struct.unpack_from("<I", model, at) == (_U32,)
        yield from (Lie(f"{key}={value}", at + 4, struct.pack("<I", value)) for value in _VALUES)
    at = model.index(b"blk.0.ffn_down_exps.weight") + len(b"blk.0.ffn_down_exps.weight")
    places = {"version": (4, 4), "tensors": (8, 8), "keys": (16, 8), "extents": (at, 4)}
    places |= {f"extent {i}": (at + 4 + 8 * i, 8) for i in range(3)}
    places |= {"type": (at + 28, 4), "offset": (at + 32, 8)}
    for name, (place, size) in places.items():
        yield from (Lie(f"{name}={v}", place, v.to_bytes(8, "little")[:size]) for v in (0, 1, 2**31, 2**63))


def record(folder: Path, data: bytes, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Status and stderr of a recording of a model of these bytes."""
    (folder / "m.gguf").write_bytes(data)
    words = ["record", str(folder / "m.gguf"), "--prompt", "ab", "-n", "1", "--budget", "100%", "--force"]
    status = main([*words, "--out", str(folder / "t.trace")])
    return status, capfd.readouterr().err


def changed(model: bytes, lie: Lie) -> bytes:
    return model[: lie.offset] + lie.data + model[lie.offset + len(lie.data) :]


@pytest.mark.parametrize("name", _FATAL)
def test_a_header_that_llama_cpp_dies_of(
    name: str, model: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lie = next(lie for lie in lies(model) if lie.name == name)
    status, shown = record(tmp_path, changed(model, lie), capfd)
    assert status == 2
    assert shown.startswith(f"simlab: error: {tmp_path}/m.gguf: ")
    assert shown.count("\n") == 1


@pytest.mark.nightly
def test_every_lie(model: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for lie in lies(model):
        status, shown = record(tmp_path, changed(model, lie), capfd)
        if lie.name.startswith(_HARMLESS) and status == 0:
            continue
        if changed(model, lie) != model:
            assert (status, shown.count("\n")) == (2, 1), (lie.name, shown)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100))
def test_flipped_bits(seed: int, model: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    data = bytearray(model)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data[rng.randrange(24, data.index(b"blk.2.ffn_down_exps.weight"))] ^= 1 << rng.randrange(8)
    status, shown = record(tmp_path, bytes(data), capfd)
    assert status in (0, 2), shown
    assert status == 0 or shown.count("\n") == 1


def test_a_good_model_is_tried_once(model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model)
    Engine(path).close()
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.run", None)
        Engine(path).close()
        path.write_bytes(model + b"\0")
        with pytest.raises(TypeError, match="not callable"):
            Engine(path)
