"""llama.cpp as a function from tokens to logits: loading, tokenising, decoding. Knows nothing of experts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simlab.errors import InputError, RunError
from simlab.record.asking import NodeFilter
from simlab.record.ggml import libraries, loaded_library
from simlab.record.mapping import no_read_ahead

EvalCallback = Callable[[int, bool, Any], bool]
"""`(tensor pointer, ask, unused) -> wanted | go on`, called hundreds of times per token; for a graph or two."""

_MAX_THREADS = 512  # ggml's own bound; beyond it the process dies
_log_lines: deque[str] = deque(maxlen=40)
_log_callback: Any = None


def silence_logs() -> None:
    """Keep llama.cpp's log in memory, from here on; its first error is quoted when something fails."""
    global _log_callback
    _log_lines.clear()
    if _log_callback is None:
        _, llama = libraries()

        def keep(_level: int, text: bytes, _user: int | None) -> None:
            _log_lines.append(text.decode(errors="replace").strip())

        _log_callback = llama.llama_log_callback(keep)
        llama.llama_log_set(_log_callback, None)
        llama.llama_backend_init()


def log_error() -> str:
    """The first error in llama.cpp's log, which what follows only repeats; where there is none, its last line."""
    errors = [line for line in _log_lines if re.search("error|fail|invalid|expected", line, re.IGNORECASE)]
    return (errors or [*_log_lines][-1:] or ["no message"])[0]


class Llama:
    """One model and one context on the CPU.

    The model is memory-mapped and its weights are never repacked, so that a tensor's bytes in memory are
    the file's. With `on_node`, llama.cpp asks before and after every graph node (see `record.hook`); without
    `read_ahead` the file's pages come in only when they are touched.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int | None = None,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_expert_used: int | None = None,
        arch: str = "",
        on_node: EvalCallback | NodeFilter | None = None,
        read_ahead: bool = True,
    ) -> None:
        _, llama = libraries()
        silence_logs()
        self._llama = llama
        self._model = self._context = None
        self._on_node: EvalCallback | NodeFilter | None = None
        self._batch: Any = None
        self.n_threads = n_threads or min(os.cpu_count() or 1, 8)
        if not 1 <= self.n_threads <= _MAX_THREADS:
            raise InputError(f"--threads {n_threads}: must lie between 1 and {_MAX_THREADS}")
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = llama.LLAMA_LOAD_MODE_MMAP
        params.use_extra_bufts = False
        if n_expert_used is not None:
            self._overrides = (llama.llama_model_kv_override * 2)()
            self._overrides[0].tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
            self._overrides[0].key = f"{arch}.expert_used_count".encode()
            self._overrides[0].value.val_i64 = n_expert_used
            params.kv_overrides = self._overrides
        loaded = contextlib.nullcontext() if read_ahead else no_read_ahead(loaded_library("libllama."))
        with loaded:
            self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise InputError(f"{path}: llama.cpp cannot load this model: {log_error()}")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.n_vocab = llama.llama_vocab_n_tokens(self._vocab)
        adds_bos = llama.llama_vocab_get_add_bos(self._vocab)
        self.bos: int | None = llama.llama_vocab_bos(self._vocab) if adds_bos else None
        """The token that the vocabulary puts before a text, if it does."""
        self.n_ctx_train = llama.llama_model_n_ctx_train(self._model)
        if self.n_ctx_train < 2:
            self.close()
            raise InputError(
                f"{path}: its context_length says {self.n_ctx_train} tokens; at least 2 are needed"
            )
        if n_ctx is not None and not 2 <= n_ctx <= self.n_ctx_train:
            self.close()
            raise InputError(
                f"--ctx {n_ctx}: must lie between 2 and the {self.n_ctx_train} tokens {path.name} was trained for"
            )
        self.n_ctx = n_ctx or min(self.n_ctx_train, 4096)
        self.n_ubatch = min(n_ubatch, self.n_ctx)
        self._path = path
        self._batch = llama.llama_batch_init(self.n_ubatch, 0, 1)
        self.open_context(on_node)

    def open_context(self, on_node: EvalCallback | NodeFilter | None) -> None:
        """A fresh context of the same size, empty, whose graph nodes are shown to `on_node`; the old one goes.

        Raises:
            RunError: llama.cpp cannot make a context of this size.
        """
        llama = self._llama
        self._close_context()
        context = llama.llama_context_default_params()
        context.n_ctx = self.n_ctx
        context.n_batch = context.n_ubatch = self.n_ubatch
        context.n_threads = context.n_threads_batch = self.n_threads
        context.no_perf = True
        if on_node is not None:
            native = isinstance(on_node, NodeFilter)
            # Both must outlive the context.
            self._on_node = on_node
            self._callback = llama.ggml_backend_sched_eval_callback(on_node.function if native else on_node)
            context.cb_eval = self._callback
            context.cb_eval_user_data = on_node.user_data if native else None
        self._context = llama.llama_init_from_model(self._model, context)
        if not self._context:
            self.close()
            raise RunError(
                f"{self._path}: llama.cpp cannot make a context of {self.n_ctx} tokens: {log_error()}"
            )

    def _need_model(self) -> None:
        if not self._model:
            raise RunError("this engine is closed")

    def tokenize(self, text: bytes) -> list[int]:
        """Token ids of a text, by the vocabulary's own rule for special tokens."""
        self._need_model()
        capacity = len(text) + 8
        buffer = (ctypes.c_int32 * capacity)()
        n = self._llama.llama_tokenize(self._vocab, text, len(text), buffer, capacity, True, False)
        if n < 0:
            raise RunError(f"llama.cpp cannot tokenise this text (needs {-n} tokens for {len(text)} bytes)")
        return list(buffer[:n])

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a token sequence."""
        self._need_model()
        pieces = []
        buffer = ctypes.create_string_buffer(256)
        for token in tokens:
            n = self._llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            if n < 0:  # the size it needs
                buffer = ctypes.create_string_buffer(-n)
                n = self._llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            pieces.append(buffer.raw[:n])
        return b"".join(pieces)

    def ends_generation(self, token: int) -> bool:
        """Whether this token ends a generation."""
        self._need_model()
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    def decode(
        self, tokens: Sequence[int], first_position: int, output_last: bool = True, output_all: bool = False
    ) -> np.ndarray | None:
        """Evaluate one graph of at most `n_ubatch` tokens; the logits `[n_vocab]` of its last token, or None.

        With `output_all`, the logits `[tokens, n_vocab]` of every token.

        Raises:
            RunError: llama.cpp refused the graph.
        """
        self._need_model()
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = first_position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = output_all or (output_last and i == len(tokens) - 1)
        status = self._llama.llama_decode(self._context, batch)
        if status != 0:
            raise RunError(
                f"llama.cpp refused a graph of {len(tokens)} tokens at position {first_position} "
                f"(status {status}, context {self.n_ctx}): {log_error()}"
            )
        if output_all:
            logits = self._llama.llama_get_logits(self._context)
            return np.ctypeslib.as_array(logits, (len(tokens), self.n_vocab)).copy()
        if not output_last:
            return None
        logits = self._llama.llama_get_logits_ith(self._context, len(tokens) - 1)
        return np.ctypeslib.as_array(logits, (self.n_vocab,)).copy()

    def clear(self) -> None:
        """Forget the context's tokens."""
        self._need_model()
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def _close_context(self) -> None:
        if self._context:
            self._llama.llama_free(self._context)
            self._context = None
        if isinstance(self._on_node, NodeFilter):
            self._on_node.close()
        self._on_node = None

    def close(self) -> None:
        """Free the context and the model."""
        self._close_context()
        if self._batch is not None:
            self._llama.llama_batch_free(self._batch)
            self._batch = None
        if self._model:
            self._llama.llama_model_free(self._model)
            self._model = None


def log_probability(logits: np.ndarray, token: int) -> float:
    """ln p of a token under softmax over the full vocabulary, in float64."""
    x = logits.astype(np.float64)
    top = x.max()
    return float(x[token] - top - np.log(np.exp(x - top).sum()))
