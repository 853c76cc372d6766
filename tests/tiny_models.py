"""Tiny random mixture-of-experts models as GGUF files, in the layouts real users have.

The weights are noise, written straight as quantised blocks: some hundred MB take two seconds and little memory.
The vocabulary is one token per byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant

from simlab.types import Gating

_N_HEAD = 4
_N_CTX = 512
_N_VOCAB = 259
_ROUTER_SPREAD = 1.5
"""Standard deviation of a router's logits: no expert is always picked, no softmax saturates."""
_SSM_STATE, _SSM_CONV = 32, 4
_RECURRENT = {("nemotron_h_moe", 0), *(("qwen35moe", i) for i in range(3))}
"""Architectures with layers that are neither attention nor experts, and where in every four they lie."""
_GATING_CODE = {"softmax": 1, "sigmoid": 2, "logits": 3}


@dataclass(frozen=True)
class Layout:
    """One layout and its sizes. `make_model` takes any field as an override."""

    arch: str
    gating: Gating
    """What the gate does to its logits; `logits` is softmax over the selected."""
    normalised: bool
    """The weights of the selected are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    bias: bool = False
    """A bias is added for the selection only."""
    groups: tuple[int, int] | None = None
    """Groups the experts lie in, and how many of them a token may pick from."""
    gated: bool = True
    """Experts have a gate projection; else only up and down."""
    fused: bool = False
    """Gate and up projections are one tensor."""
    dense_lead: int = 0
    """Leading layers without experts."""
    moe_every: int = 1
    """Of the others, every how manieth has experts (the last of each run)."""
    shared: bool = False
    """An always active expert beside the routed ones."""
    quants: tuple[tuple[str, str], ...] = (("Q8_0", "Q8_0"),)
    """Types of the experts' gate/up and down projections; the layers cycle through them."""
    shards: int = 1
    n_layer: int = 3
    n_embd: int = 64
    n_ff: int = 96
    n_expert: int = 8
    k: int = 2

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return tuple(range(self.dense_lead + self.moe_every - 1, self.n_layer, self.moe_every))

    @property
    def separate_gate(self) -> bool:
        """The weights are gathered from another tensor than the one that is sorted."""
        return self.bias or self.groups is not None or self.arch == "llama4"

    @property
    def n_kv(self) -> int:
        """Key-value heads."""
        return _N_HEAD if self.arch == "olmoe" else _N_HEAD // 2

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Expert tensors of a layer, as in `blk.<i>.<suffix>.weight`."""
        if self.fused:
            return ("ffn_gate_up_exps", "ffn_down_exps")
        return (*(("ffn_gate_exps",) if self.gated else ()), "ffn_up_exps", "ffn_down_exps")

    def entry_bytes(self, layer: int) -> int:
        """Bytes of one expert of a layer."""
        up, down = self.quants[layer % len(self.quants)]
        n_up = 2 if self.gated else 1
        return n_up * _byte_count((self.n_embd, self.n_ff), up) + _byte_count((self.n_ff, self.n_embd), down)


_MIXED = (("Q8_0", "Q8_0"), ("Q4_K", "Q5_0"), ("Q4_0", "F16"), ("Q5_0", "Q4_0"))
_QWEN = Layout("qwen3moe", "softmax", normalised=True)
_SIGMOID = Layout("hy_v3", "sigmoid", normalised=True, scale=2.5, bias=True, shared=True, n_layer=4, k=3)

LAYOUTS: dict[str, Layout] = {
    "split": _QWEN,
    "mixed": replace(_QWEN, quants=_MIXED, n_layer=4, n_embd=256),
    "sharded": replace(_QWEN, shards=3),
    "top1": replace(_QWEN, k=1),
    "wide": replace(_QWEN, n_expert=256, k=8, n_ff=32),
    "unnormalised": Layout("olmoe", "softmax", normalised=False, k=3),
    "fused": replace(_SIGMOID, scale=1.5, fused=True, dense_lead=1),
    "grouped": replace(_SIGMOID, arch="bailingmoe2", groups=(4, 2), dense_lead=1, n_expert=16, k=4),
    "nemotron": replace(_SIGMOID, arch="nemotron_h_moe", gated=False, moe_every=2),
    "gemma4": replace(_QWEN, arch="gemma4", fused=True, dense_lead=1, shared=True, n_layer=4, k=3),
    "gpt-oss": Layout("gpt-oss", "logits", normalised=False, quants=(("MXFP4", "MXFP4"),), k=3),
    "llama4": Layout("llama4", "sigmoid", normalised=False, moe_every=2, shared=True, n_layer=4, k=1),
    "qwen35": replace(_QWEN, arch="qwen35moe", shared=True, n_layer=4, n_expert=16, k=4),
}


class _Tensor(NamedTuple):
    """A tensor to write: extents in ggml's order, and its values' distribution."""

    name: str
    shape: tuple[int, ...]
    quant: str = "F32"
    spread: float = 1.0
    centre: float = 0.0


def make_model(folder: Path, layout: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a model of one of the `LAYOUTS`, deterministic by seed; returns the file to open, the first shard's.

    `overrides` replace the layout's fields: `make_model(tmp, "split", n_layer=8, n_embd=512, n_ff=768,
    n_expert=32)` has 320 MB of experts. What an architecture's graph fixes (qwen3moe always normalises) stays.
    """
    made = replace(LAYOUTS[layout], **overrides)
    tensors = list(_tensors(made))
    path = folder / f"{layout}.gguf"
    per_shard = math.ceil(len(tensors) / made.shards) if made.shards > 1 else 0
    w = gguf.GGUFWriter(path, made.arch, split_max_tensors=per_shard)
    _add_vocabulary(w)
    w.add_name(f"tiny random {layout}")
    add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, list: w.add_array}
    for key, value in _metadata(made).items():
        add[type(value)](f"{made.arch}.{key}", value)
    for t in tensors:
        # The type that counts is the last argument.
        size = _byte_count(t.shape, t.quant)
        w.add_tensor_info(t.name, t.shape[::-1], np.dtype("f4"), size, Quant[t.quant])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for t in tensors:
        w.write_tensor_data(_values(rng, t))
    w.close()
    return path if made.shards == 1 else folder / f"{layout}-00001-of-{made.shards:05d}.gguf"


# -- bytes ---------------------------------------------------------------------------------------------------

_HALVES = {
    # The float16 numbers at the head of a block, for values of standard deviation 1 if the rest is noise.
    "Q8_0": (1 / 73.9,),
    "Q4_0": (1 / 4.61,),
    "Q5_0": (1 / 9.23,),
    "Q4_K": (1 / 257, 7.5 / 257),
}


def _byte_count(shape: tuple[int, ...], quant: str) -> int:
    block, size = gguf.GGML_QUANT_SIZES[Quant[quant]]
    if shape[0] % block:
        raise ValueError(f"rows of {shape[0]} do not divide into {quant} blocks of {block}")
    return math.prod(shape) // block * size


def _values(rng: np.random.Generator, tensor: _Tensor) -> np.ndarray:
    """The tensor's bytes: floats, or noise in quantised blocks under heads that give it its spread."""
    if tensor.quant in ("F32", "F16"):
        values = rng.standard_normal(math.prod(tensor.shape), dtype=np.float32)
        values = values * np.float32(tensor.spread) + np.float32(tensor.centre)
        return values.astype(np.float16 if tensor.quant == "F16" else np.float32)
    size = gguf.GGML_QUANT_SIZES[Quant[tensor.quant]][1]
    n_bytes = _byte_count(tensor.shape, tensor.quant)
    blocks = np.frombuffer(bytearray(rng.bytes(n_bytes)), dtype=np.uint8).reshape(-1, size)
    if tensor.quant == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(tensor.spread / 2.93))
        return blocks.reshape(-1)
    halves = np.array(_HALVES[tensor.quant]) * tensor.spread
    scales = rng.uniform(0.5, 1.5, size=(len(blocks), 1)) * halves
    blocks[:, : 2 * len(halves)] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(-1)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Three special tokens and one per byte; no text gets a special token or a space in front."""
    space = 3 + ord(" ")
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    tokens[space], types[space] = "\u2581", gguf.TokenType.NORMAL
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for never in (writer.add_add_bos_token, writer.add_add_eos_token, writer.add_add_space_prefix):
        never(False)


def _metadata(m: Layout) -> dict[str, Any]:
    """Keys below `<arch>.`"""
    head = m.n_embd // _N_HEAD
    values: dict[str, Any] = {
        "context_length": _N_CTX,
        "block_count": m.n_layer,
        "embedding_length": m.n_embd,
        "feed_forward_length": m.n_ff,
        "attention.head_count": _N_HEAD,
        "attention.head_count_kv": m.n_kv,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": head,
        "expert_count": m.n_expert,
        "expert_used_count": m.k,
        "expert_feed_forward_length": m.n_ff,
    }
    if m.arch in ("hy_v3", "bailingmoe2", "nemotron_h_moe"):
        values |= {
            "leading_dense_block_count": m.dense_lead,
            "expert_gating_func": _GATING_CODE[m.gating],
            "expert_weights_norm": m.normalised,
            "expert_weights_scale": m.scale,
            "expert_shared_count": int(m.shared),
            "expert_shared_feed_forward_length": m.n_ff,
        }
    if m.groups is not None:
        values["expert_group_count"], values["expert_group_used_count"] = m.groups
    if m.arch == "gemma4":
        values |= {
            "attention.key_length_swa": head,
            "attention.value_length_swa": head,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": [i % 2 == 0 for i in range(m.n_layer)],
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        }
    if m.arch == "gpt-oss":
        values["attention.sliding_window"] = 16
    if m.arch == "llama4":
        values["interleave_moe_layer_step"] = m.moe_every
    if m.arch == "nemotron_h_moe":
        values |= {
            "attention.layer_norm_epsilon": 1e-6,
            "attention.head_count_kv": [m.n_kv if i % 4 == 2 else 0 for i in range(m.n_layer)],
            "feed_forward_length": [m.n_ff if i in m.moe_layers else 0 for i in range(m.n_layer)],
        }
    if m.arch == "qwen35moe":
        values |= {
            "expert_shared_feed_forward_length": m.n_ff,
            "rope.dimension_sections": [head // 4, head // 8, head // 8, 0],
            "full_attention_interval": 4,
        }
    if m.arch in ("nemotron_h_moe", "qwen35moe"):
        n_heads = m.n_embd // _SSM_STATE
        values |= {
            "ssm.conv_kernel": _SSM_CONV,
            "ssm.inner_size": m.n_embd,
            "ssm.state_size": _SSM_STATE,
            "ssm.time_step_rank": n_heads,
            "ssm.group_count": n_heads,
        }
    return values


# -- tensors -------------------------------------------------------------------------------------------------


def _tensors(m: Layout) -> Iterator[_Tensor]:
    yield _matrix("token_embd.weight", m.n_embd, _N_VOCAB)._replace(spread=1.0)
    yield _norm("output_norm.weight", m.n_embd)
    yield _matrix("output.weight", m.n_embd, _N_VOCAB)._replace(spread=3 / math.sqrt(m.n_embd))
    if m.arch == "gemma4":
        yield _Tensor("rope_freqs.weight", (m.n_embd // _N_HEAD // 2,), spread=0.1, centre=1.0)
    for i in range(m.n_layer):
        for tensor in (*_attention(m, i), *_feed_forward(m, i)):
            yield tensor._replace(name=f"blk.{i}.{tensor.name}")


def _matrix(name: str, *shape: int, quant: str = "Q8_0") -> _Tensor:
    return _Tensor(name, shape, quant, 1 / math.sqrt(shape[0]))


def _norm(name: str, n: int) -> _Tensor:
    return _Tensor(name, (n,), spread=0.1, centre=1.0)


def _attention(m: Layout, layer: int) -> Iterator[_Tensor]:
    head, n_kv = m.n_embd // _N_HEAD, m.n_kv
    yield _norm("attn_norm.weight", m.n_embd)
    if m.arch in ("gemma4", "gpt-oss", "qwen35moe"):
        yield _norm("post_attention_norm.weight", m.n_embd)
    if m.arch == "nemotron_h_moe" and layer in m.moe_layers:
        return
    if (m.arch, layer % 4) in _RECURRENT:
        yield from _recurrent(m)
        return
    if m.arch == "bailingmoe2":
        yield _matrix("attn_qkv.weight", m.n_embd, m.n_embd + 2 * n_kv * head)
    else:
        gated = 2 if m.arch == "qwen35moe" else 1
        yield _matrix("attn_q.weight", m.n_embd, m.n_embd * gated)
        yield _matrix("attn_k.weight", m.n_embd, n_kv * head)
        yield _matrix("attn_v.weight", m.n_embd, n_kv * head)
    yield _matrix("attn_output.weight", m.n_embd, m.n_embd)
    if m.arch not in ("gpt-oss", "llama4", "nemotron_h_moe"):
        width = m.n_embd if m.arch == "olmoe" else head
        yield _norm("attn_q_norm.weight", width)
        yield _norm("attn_k_norm.weight", width)
    if m.arch == "gpt-oss":
        yield _Tensor("attn_sinks.weight", (_N_HEAD,))
        for name, n in (("q", m.n_embd), ("k", n_kv * head), ("v", n_kv * head), ("output", m.n_embd)):
            yield _Tensor(f"attn_{name}.bias", (n,), spread=0.1)


def _recurrent(m: Layout) -> Iterator[_Tensor]:
    """What stands in for attention: a Mamba 2 mixer in nemotron, a gated delta net in qwen35."""
    n_heads, width = m.n_embd // _SSM_STATE, 3 * m.n_embd
    yield _Tensor("ssm_conv1d.weight", (_SSM_CONV, width), spread=0.5)
    yield _Tensor("ssm_dt.bias", (n_heads,), spread=0.1)
    yield _matrix("ssm_out.weight", m.n_embd, m.n_embd)
    if m.arch == "nemotron_h_moe":
        yield _matrix("ssm_in.weight", m.n_embd, width + m.n_embd + n_heads)
        yield _Tensor("ssm_conv1d.bias", (width,), spread=0.1)
        yield _Tensor("ssm_a", (1, n_heads), spread=0.1, centre=-1.0)
        yield _Tensor("ssm_d", (1, n_heads))
        yield _Tensor("ssm_norm.weight", (_SSM_STATE, n_heads), spread=0.1, centre=1.0)
    else:
        yield _matrix("attn_qkv.weight", m.n_embd, width)
        yield _matrix("attn_gate.weight", m.n_embd, m.n_embd)
        yield _Tensor("ssm_a", (n_heads,), spread=0.1, centre=-1.0)
        yield _matrix("ssm_beta.weight", m.n_embd, n_heads)
        yield _matrix("ssm_alpha.weight", m.n_embd, n_heads)
        yield _norm("ssm_norm.weight", _SSM_STATE)


def _feed_forward(m: Layout, layer: int) -> Iterator[_Tensor]:
    if m.arch == "nemotron_h_moe" and layer not in m.moe_layers:
        return
    if m.arch not in ("gpt-oss", "qwen35moe", "nemotron_h_moe"):
        yield _norm("ffn_norm.weight", m.n_embd)
    if m.arch == "gemma4":
        yield _norm("post_ffw_norm.weight", m.n_embd)
    routed = layer in m.moe_layers
    if not routed or m.arch == "gemma4":
        yield from _dense(m, "")
    elif m.shared:
        yield from _dense(m, "_shexp")
    if routed:
        yield from _router(m)
        yield from _experts(m, layer)


def _dense(m: Layout, suffix: str) -> Iterator[_Tensor]:
    if m.gated:
        yield _matrix(f"ffn_gate{suffix}.weight", m.n_embd, m.n_ff)
    yield _matrix(f"ffn_up{suffix}.weight", m.n_embd, m.n_ff)
    yield _matrix(f"ffn_down{suffix}.weight", m.n_ff, m.n_embd)


def _router(m: Layout) -> Iterator[_Tensor]:
    spread = _ROUTER_SPREAD / math.sqrt(m.n_embd)
    yield _Tensor("ffn_gate_inp.weight", (m.n_embd, m.n_expert), spread=spread)
    if m.bias:
        name = "exp_probs_b" if m.arch == "hy_v3" else "exp_probs_b.bias"
        yield _Tensor(name, (m.n_expert,), spread=0.1)
    if m.arch == "gpt-oss":
        yield _Tensor("ffn_gate_inp.bias", (m.n_expert,), spread=0.3)
    if m.arch == "qwen35moe":
        yield _Tensor("ffn_gate_inp_shexp.weight", (m.n_embd,), spread=spread)
    if m.arch == "gemma4":
        # Its router divides its input by sqrt(n_embd).
        width = math.sqrt(m.n_embd)
        yield _Tensor("ffn_gate_inp.scale", (m.n_embd,), spread=0.1 * width, centre=width)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield _norm(f"{name}.weight", m.n_embd)


def _experts(m: Layout, layer: int) -> Iterator[_Tensor]:
    up, down = m.quants[layer % len(m.quants)]
    for suffix in m.suffixes:
        n_in, n_out, quant = m.n_embd, m.n_ff * (2 if m.fused else 1), up
        if suffix == "ffn_down_exps":
            n_in, n_out, quant = m.n_ff, m.n_embd, down
        yield _matrix(f"{suffix}.weight", n_in, n_out, m.n_expert, quant=quant)
        if m.arch == "gpt-oss":
            yield _Tensor(f"{suffix}.bias", (n_out, m.n_expert), spread=0.1)
    if m.arch == "gemma4":
        yield _Tensor("ffn_down_exps.scale", (m.n_expert,), spread=0.1, centre=1.0)
