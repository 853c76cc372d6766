"""The embedded model: its vocabulary is bytes, and its loss holds to the end of its stated context."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from live import THREADS

from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.train.figures import HELD_OUT, TEXTS, held_out

BYTE_OFFSET = 3


@pytest.fixture(scope="module")
def engine():
    with Engine(n_threads=THREADS, n_ubatch=4096) as engine:
        yield engine


@pytest.mark.parametrize("path", [HELD_OUT, *TEXTS], ids=lambda path: path.name)
def test_a_token_is_a_byte_and_back(engine, path):
    text = path.read_bytes()
    tokens = engine.tokenize(text)
    assert tokens == [byte + BYTE_OFFSET for byte in text]
    assert engine.detokenize(tokens) == text


def test_every_byte_has_a_token(engine):
    # The 0 byte ends a C string and is no text.
    text = bytes(range(1, 256))
    assert engine.tokenize(text) == [byte + BYTE_OFFSET for byte in text]
    assert engine.detokenize(engine.tokenize(text)) == text


@pytest.mark.slow
def test_the_loss_is_flat_up_to_the_stated_context(engine):
    text = HELD_OUT.read_bytes()
    found = held_out(engine, text[: 10 * engine.n_ctx])
    parts = np.array(found.by_part)
    # The first part has little to go on; a model used past what it was trained for doubles its loss.
    assert parts[1:].max() < 1.15 * parts[1:].mean()
    assert parts[-1] < parts[0] * 1.1
    assert found.nll < 0.9
    for layer in found.layers:
        assert layer.unused == 0
        assert layer.load_experts > 32
        assert 0 < layer.top_k_mass < 1


def test_the_hash_in_the_docs_is_the_files():
    digest = hashlib.sha256(EMBEDDED_MODEL.read_bytes()).hexdigest()
    assert digest in EMBEDDED_MODEL.with_name("README.md").read_text()
