"""The embedded model's network: byte-level, of the shape llama.cpp calls qwen3moe.

The expert layer is written for CPUs. The entries of a batch are laid out expert by expert and multiplied in bfloat16
as one batched product, both passes move rows by gathers alone (the way back is a gather through the inverse
permutation), and an expert's batch is capped while training: early on one expert can draw most of the tokens, and the
padding of all the others up to its batch would make a step ten times as long.
"""

# pyright: reportMissingImports=false
# (PyTorch is the `train` extra's, which nothing else needs.)
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_fused = functools.partial(torch.compile, dynamic=False)

BYTE_OFFSET = 3
"""Ids 0 to 2 are `<unk>`, `<s>` and `</s>`; the id of a byte is its value plus three."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are those of the embedded model."""

    vocabulary: int = 256 + BYTE_OFFSET
    width: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    experts: int = 64
    used: int = 8
    expert_width: int = 64
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6


class _Layout(NamedTuple):
    """Where the entries of a batch lie: `token` [E * rows] is the token of a slot and `kept` whether it has one,
    `slot` [tokens, k] the slot of a token's entry and `held` whether it got one under the cap."""

    token: Tensor
    kept: Tensor
    slot: Tensor
    held: Tensor
    rows: int


def _lay_out(chosen: Tensor, experts: int, cap_ratio: float | None) -> _Layout:
    tokens, used = chosen.shape
    entry_expert = chosen.reshape(-1)
    counts = torch.bincount(entry_expert, minlength=experts)
    rows = int(counts.max()) if cap_ratio is None else int(cap_ratio * tokens * used / experts) + 8
    order = entry_expert.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    place = torch.arange(tokens * used) - starts[entry_expert[order]]
    fits = place < rows
    slots = entry_expert[order] * rows + place.clamp(max=rows - 1)
    token = torch.zeros(experts * rows, dtype=torch.long)
    kept = torch.zeros(experts * rows)
    token[slots[fits]] = order[fits] // used
    kept[slots[fits]] = 1
    slot = torch.empty_like(order)
    slot[order] = slots
    held = torch.empty(tokens * used)
    held[order] = fits.float()
    return _Layout(token, kept, slot.view(tokens, used), held.view(tokens, used), rows)


@_fused
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@_fused
def _swiglu_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu, silu * up


@_fused
def _slot_gradients(grad: Tensor, outputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad * weight[:, None].bfloat16(), (grad.float() * outputs).sum(1)


class _Experts(torch.autograd.Function):
    """The weighted sum of the chosen experts' outputs; the gradients are written out so that nothing is scattered."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, layout: _Layout
    ) -> Tensor:
        experts, width, _ = gate.shape
        gate, up, down = gate.bfloat16(), up.bfloat16(), down.bfloat16()
        rows = F.embedding(layout.token, x.bfloat16()).view(experts, layout.rows, width)
        hidden_gate, hidden_up = torch.bmm(rows, gate), torch.bmm(rows, up)
        outputs = torch.bmm(_swiglu(hidden_gate, hidden_up), down).view(-1, width)
        ctx.save_for_backward(weights, gate, up, down, rows, hidden_gate, hidden_up, outputs)
        ctx.layout = layout
        return _weighted_sum(layout.slot, outputs, weights * layout.held)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weights, gate, up, down, rows, hidden_gate, hidden_up, outputs = ctx.saved_tensors
        layout: _Layout = ctx.layout
        experts, _, width = rows.shape
        entry_weights = (weights * layout.held).view(-1)
        slot_weight = torch.zeros_like(layout.kept)
        # Accumulated, because an entry over the cap shares a slot with another and adds nothing to it.
        slot_weight.index_add_(0, layout.slot.view(-1), entry_weights)
        grad_slot = F.embedding(layout.token, grads[0].bfloat16())
        scaled, slot_product = _slot_gradients(grad_slot, outputs, slot_weight * layout.kept)
        scaled = scaled.view(experts, layout.rows, width)
        grad_weights = slot_product[layout.slot] * layout.held
        grad_hidden = torch.bmm(scaled, down.transpose(1, 2))
        grad_gate_hidden, grad_up_hidden, gated = _swiglu_gradient(grad_hidden, hidden_gate, hidden_up)
        grad_down = torch.bmm(gated.transpose(1, 2), scaled).float()
        rows = rows.transpose(1, 2)
        grad_gate = torch.bmm(rows, grad_gate_hidden).float()
        grad_up = torch.bmm(rows, grad_up_hidden).float()
        grad_rows = torch.bmm(grad_gate_hidden, gate.transpose(1, 2))
        grad_rows.baddbmm_(grad_up_hidden, up.transpose(1, 2))
        grad_x = _weighted_sum(layout.slot, grad_rows.view(-1, width), layout.held)
        return grad_x, grad_weights, grad_gate, grad_up, grad_down, None


def _weighted_sum(slot: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Sum over a token's k slots of weight times row: [tokens, width]."""
    return F.embedding_bag(slot, rows, per_sample_weights=weights.bfloat16(), mode="sum").float()


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    @_fused
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def _linear(inputs: int, outputs: int, deviation: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=deviation)
    return linear


class Attention(nn.Module):
    """Grouped-query attention with RMS-normalised queries and keys and rotary positions over the two halves."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        deviation = 1 / math.sqrt(shape.width)
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q = _linear(shape.width, queries, deviation)
        self.k = _linear(shape.width, keys, deviation)
        self.v = _linear(shape.width, keys, deviation)
        self.out = _linear(queries, shape.width, deviation / math.sqrt(2 * shape.layers))
        self.q_norm = RMSNorm(shape.head_width, shape.norm_epsilon)
        self.k_norm = RMSNorm(shape.head_width, shape.norm_epsilon)

    @_fused
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = x.bfloat16()
        q, k, v = (
            F.linear(x, part.weight.bfloat16())
            .float()
            .view(batch, length, -1, self.shape.head_width)
            .transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q = _rotated(self.q_norm(q), cos, sin)
        k = _rotated(self.k_norm(k), cos, sin)
        # In float32: the bfloat16 kernel's backward pass is the slower one on CPUs.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return F.linear(mixed.bfloat16(), self.out.weight.bfloat16()).float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Experts(nn.Module):
    """Softmax over all experts, the k largest taken and renormalised; `balance` is 1 for even use of the experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = _linear(shape.width, shape.experts, 0.05)
        inward, outward = 1 / math.sqrt(shape.width), 1 / math.sqrt(shape.expert_width)
        sizes = (shape.experts, shape.width, shape.expert_width)
        self.gate = nn.Parameter(torch.randn(sizes) * inward)
        self.up = nn.Parameter(torch.randn(sizes) * inward)
        self.down = nn.Parameter(
            torch.randn(sizes).transpose(1, 2).contiguous() * outward / math.sqrt(2 * shape.layers)
        )

    def forward(self, x: Tensor, cap_ratio: float | None) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        scores = F.linear(tokens, self.router.weight).softmax(-1)
        weights, chosen = scores.topk(self.shape.used, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        layout = _lay_out(chosen, self.shape.experts, cap_ratio)
        out = _Experts.apply(tokens, weights, self.gate, self.up, self.down, layout)
        share = torch.bincount(chosen.reshape(-1), minlength=self.shape.experts) / chosen.numel()
        balance = self.shape.experts * (share * scores.mean(0)).sum()
        return out.view_as(x), balance


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, shape.norm_epsilon)
        self.attention = Attention(shape)
        self.experts_norm = RMSNorm(shape.width, shape.norm_epsilon)
        self.experts = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cap_ratio: float | None) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        mixed, balance = self.experts(self.experts_norm(x), cap_ratio)
        return x + mixed, balance


class Network(nn.Module):
    """Ids [batch, length] to logits [batch, length, vocabulary] and the mean balance over layers."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_epsilon)
        self.head = _linear(shape.width, shape.vocabulary, 1 / math.sqrt(shape.width))
        half = shape.head_width // 2
        turns = shape.rope_base ** (-torch.arange(half) / half)
        angles = torch.arange(context)[:, None] * turns[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, cap_ratio: float | None = None) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        length = ids.shape[1]
        balances = []
        for block in self.blocks:
            x, balance = block(x, self.cos[:length], self.sin[:length], cap_ratio)
            balances.append(balance)
        logits = F.linear(self.norm(x).bfloat16(), self.head.weight.bfloat16()).float()
        return logits, torch.stack(balances).mean()
