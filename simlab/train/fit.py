"""Trains the embedded model on two CPU cores.

The context grows in phases; most of the tokens are seen at a short one. The learning rate is constant and then falls in
a line to the end, over all phases. A run that was killed goes on from its last checkpoint; the batch of a step depends
on its number alone.
"""

# pyright: reportMissingImports=false
# (PyTorch is the `train` extra's, which nothing else needs.)
from __future__ import annotations

import ctypes
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from simlab.errors import RunError
from simlab.files import replacing

from .network import BYTE_OFFSET, Network, Shape
from .optimizer import Muon

CHECKPOINT = "checkpoint.pt"
_SAVE_EVERY_STEPS = 200
_LOG_EVERY_STEPS = 20
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


@dataclass(frozen=True)
class Phase:
    """`steps` batches of `batch` texts of `context` tokens."""

    context: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on; written beside its checkpoint."""

    shape: Shape = field(default_factory=Shape)
    phases: tuple[Phase, ...] = (Phase(256, 24, 2800), Phase(1024, 6, 700), Phase(2048, 3, 250))
    learning_rate: float = 1.2e-2
    adam_rate_ratio: float = 0.5
    """The rate of embedding, head, router and norms, which Adam trains, as a share of the matrices' rate."""
    warmup_steps: int = 100
    constant_share: float = 0.4
    balance_weight: float = 0.01
    cap_ratio: float = 1.5
    """An expert's batch is cut at this many times the mean batch."""
    seed: int = 0

    @property
    def context(self) -> int:
        return self.phases[-1].context

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


def keep_memory() -> None:
    """Tells glibc to keep freed blocks: a step frees and takes again hundreds of MB, and fetching them from the kernel
    page by page costs more than the arithmetic on them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 512 * 2**20):
            mallopt(option, value)


def as_ids(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64)) + BYTE_OFFSET


def train(text: bytes, held_out: bytes, folder: Path, plan: Plan) -> Network:
    """Runs `plan` on `text` and returns the network; `folder` gets the checkpoint and the plan.

    Raises:
        RunError: `folder` holds the checkpoint of another plan.
    """
    _keep_plan(folder, plan)
    torch.manual_seed(plan.seed)
    torch.set_flush_denormal(True)
    keep_memory()
    ids, held_ids = as_ids(text), as_ids(held_out)
    network = Network(plan.shape, plan.context)
    optimizers = _optimizers(network, plan)
    done = _resume(folder / CHECKPOINT, network, optimizers)
    seconds = 0.0 if done is None else done[1]
    started = time.monotonic() - seconds
    print(
        f"{sum(p.numel() for p in network.parameters()) / 1e6:.1f} M parameters, {len(ids) / 1e6:.1f} MB of text",
        flush=True,
    )
    step = 0
    for phase in plan.phases:
        for _ in range(phase.steps):
            step += 1
            if done is not None and step <= done[0]:
                continue
            rate = _rate(plan, step)
            loss, balance = _train_step(network, optimizers, _batch(ids, phase, plan.seed, step), rate, plan)
            if step % _LOG_EVERY_STEPS == 0:
                spent = time.monotonic() - started
                losses = f"nll {loss:.3f} balance {balance:.2f}"
                print(f"step {step}/{plan.steps} context {phase.context} {losses} {spent:.0f} s", flush=True)
            if step % _SAVE_EVERY_STEPS == 0 or step == plan.steps:
                _save(folder / CHECKPOINT, network, optimizers, step, time.monotonic() - started)
            if step % (5 * _SAVE_EVERY_STEPS) == 0:
                nll = held_out_nll(network, held_ids, phase.context, windows=40).mean()
                print(
                    f"step {step} held out {nll:.4f} nats per byte, {nll / math.log(2):.3f} bits", flush=True
                )
    nll = held_out_nll(network, held_ids, plan.context)
    eighths = " ".join(f"{part.mean():.3f}" for part in np.array_split(nll.mean(0), 8))
    print(f"held out {nll.mean():.4f} nats per byte, {nll.mean() / math.log(2):.3f} bits")
    print(f"by eighth of the context {eighths}")
    return network


def _keep_plan(folder: Path, plan: Plan) -> None:
    path, text = folder / "plan.json", json.dumps(asdict(plan), indent=1) + "\n"
    if (folder / CHECKPOINT).exists() and path.read_text() != text:
        raise RunError(
            f"{folder} holds a run of another plan ({path}); train in another folder, or empty this one"
        )
    path.write_text(text)


def held_out_nll(network: Network, ids: Tensor, context: int, windows: int | None = None) -> np.ndarray:
    """Nats per byte [windows, context - 1], every entry kept, over `windows` evenly spaced stretches of the text, or
    all of its stretches side by side."""
    count = len(ids) // context
    starts = (
        np.arange(count) * context
        if windows is None or windows >= count
        else np.linspace(0, len(ids) - context, windows)
    )
    rows = []
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for start in starts.astype(int):
            part = ids[start : start + context]
            logits, _ = network(part[None])
            rows.append(F.cross_entropy(logits[0, :-1], part[1:], reduction="none").numpy())
    return np.stack(rows)


def _optimizers(network: Network, plan: Plan) -> tuple[torch.optim.Optimizer, ...]:
    matrices, rest = [], []
    for name, parameter in network.named_parameters():
        is_matrix = parameter.ndim > 1 and not any(part in name for part in ("embedding", "head", "router"))
        (matrices if is_matrix else rest).append(parameter)
    rate = plan.learning_rate
    adam_rate = rate * plan.adam_rate_ratio
    return Muon(matrices, rate), torch.optim.AdamW(
        rest, adam_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )


def _rate(plan: Plan, step: int) -> float:
    """The share of the full learning rate at `step`, counted from 1."""
    left = (plan.steps - step + 1) / plan.steps / (1 - plan.constant_share)
    return min(1.0, step / plan.warmup_steps, left)


def _batch(ids: Tensor, phase: Phase, seed: int, step: int) -> Tensor:
    starts = np.random.default_rng((seed, step)).integers(0, len(ids) - phase.context - 1, phase.batch)
    return torch.stack([ids[start : start + phase.context + 1] for start in starts])


def _train_step(
    network: Network, optimizers: tuple[torch.optim.Optimizer, ...], batch: Tensor, rate: float, plan: Plan
) -> tuple[float, float]:
    for optimizer, full in zip(optimizers, (1.0, plan.adam_rate_ratio), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * full * rate
        optimizer.zero_grad()
    logits, balance = network(batch[:, :-1], plan.cap_ratio)
    nll = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
    (nll + plan.balance_weight * balance).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return nll.item(), balance.item()


def _save(
    path: Path, network: Network, optimizers: tuple[torch.optim.Optimizer, ...], step: int, seconds: float
) -> None:
    state = {
        "network": network.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "seconds": seconds,
    }
    with replacing(path) as temporary:
        torch.save(state, temporary)


def _resume(
    path: Path, network: Network, optimizers: tuple[torch.optim.Optimizer, ...]
) -> tuple[int, float] | None:
    """The step and seconds of the checkpoint taken up, if there is one."""
    if not path.exists():
        return None
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["network"])
    for optimizer, part in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(part)
    print(f"going on after step {state['step']}", flush=True)
    return state["step"], state["seconds"]
