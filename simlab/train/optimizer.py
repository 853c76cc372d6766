"""Muon for the matrices, Adam for the rest, under one learning rate.

Muon takes the momentum of a matrix to its nearest orthogonal matrix by a few Newton-Schulz steps (Jordan et al. 2024),
here for a whole stack of expert matrices as batched bfloat16 products; the update is scaled to the size of an Adam step
(Liu et al. 2025, "Muon is scalable for LLM training"), so both kinds share the schedule.
"""

# pyright: reportMissingImports=false
# (PyTorch is the `train` extra's, which nothing else needs.)
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """For parameters [.., rows, columns]; every matrix of a stack is taken alone."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.03
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = _orthogonal(parameter.grad.lerp(momentum, group["momentum"]))
                scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


@torch.compile(dynamic=False)
def _orthogonal(matrices: Tensor) -> Tensor:
    stack = matrices.bfloat16().reshape(-1, *matrices.shape[-2:])
    tall = stack.shape[-2] > stack.shape[-1]
    if tall:
        stack = stack.transpose(1, 2)
    stack = stack / (stack.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = torch.bmm(stack, stack.transpose(1, 2))
        stack = a * stack + torch.bmm(torch.baddbmm(gram, gram, gram, beta=b, alpha=c), stack)
    if tall:
        stack = stack.transpose(1, 2)
    return stack.reshape(matrices.shape).to(matrices.dtype)
