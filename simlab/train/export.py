# pyright: reportMissingImports=false
# (PyTorch is the `train` extra's, which nothing else needs.)
"""From a checkpoint to a GGUF file of architecture qwen3moe: matrices in Q8_0, norms and routers in F32.

The vocabulary says how llama.cpp must cut a text into bytes. Its SPM tokeniser writes a space as U+2581 before it looks
anything up, so byte 32 has that character as a piece of its own; every other byte is found through the byte pieces.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from .network import BYTE_OFFSET, Shape

_SPACE = "\u2581"


def export(checkpoint: Path, target: Path, shape: Shape, context: int) -> None:
    """Writes the network of `checkpoint` as `target`, trained for `context` tokens."""
    state: dict[str, Tensor] = torch.load(checkpoint, weights_only=True)["network"]
    writer = gguf.GGUFWriter(target, "qwen3moe")
    writer.add_name("simlab-tiny-moe")
    writer.add_license("PSF-2.0")
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _add_vocabulary(writer)
    for name, tensor in _tensors(state, shape):
        values = np.ascontiguousarray(tensor.float().numpy())
        if name.endswith("norm.weight") or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [
        gguf.TokenType.BYTE
    ] * 256
    space = ord(" ") + BYTE_OFFSET
    pieces[space], kinds[space] = _SPACE, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _tensors(state: dict[str, Tensor], shape: Shape) -> list[tuple[str, Tensor]]:
    """(GGUF name, tensor) in file order; expert matrices as `[experts, outputs, inputs]`."""
    found = [
        ("token_embd.weight", state["embedding.weight"]),
        ("output_norm.weight", state["norm.weight"]),
        ("output.weight", state["head.weight"]),
    ]
    for layer in range(shape.layers):
        own = {
            name.removeprefix(f"blocks.{layer}."): t
            for name, t in state.items()
            if f"blocks.{layer}." in name
        }
        names = {
            "attn_norm": own["attention_norm.weight"],
            "attn_q": own["attention.q.weight"],
            "attn_k": own["attention.k.weight"],
            "attn_v": own["attention.v.weight"],
            "attn_output": own["attention.out.weight"],
            "attn_q_norm": own["attention.q_norm.weight"],
            "attn_k_norm": own["attention.k_norm.weight"],
            "ffn_norm": own["experts_norm.weight"],
            "ffn_gate_inp": own["experts.router.weight"],
            "ffn_gate_exps": own["experts.gate"].transpose(1, 2),
            "ffn_up_exps": own["experts.up"].transpose(1, 2),
            "ffn_down_exps": own["experts.down"].transpose(1, 2),
        }
        found += [(f"blk.{layer}.{name}.weight", tensor) for name, tensor in names.items()]
    return found
