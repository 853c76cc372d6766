"""Training the embedded model: the expert layer's own gradients, going on after a stop, and the file that comes out."""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the training extra is not installed: pip install 'simlab[train]'")

import torch
import torch.nn.functional as F

from simlab.errors import RunError
from simlab.train import fit
from simlab.train.corpus import build_corpus, write_texts
from simlab.train.export import export
from simlab.train.fit import CHECKPOINT, Phase, Plan, as_ids, held_out_nll, train
from simlab.train.network import Experts, Network, Shape, _Experts, _lay_out

# The compiler of torch looks at every tensor's gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

SMALL = Shape(width=32, layers=2, heads=2, kv_heads=1, head_width=16, experts=8, used=2, expert_width=32)
PLAN = Plan(shape=SMALL, phases=(Phase(16, 4, 4), Phase(32, 2, 2)), warmup_steps=2)
TEXT = b"def f(x):\n    return x + 1\n\n" * 40
# Products in bfloat16 keep 8 bits.
CLOSE = 2e-2


def plain(x, weights, chosen, gate, up, down) -> Any:
    """The expert layer as its formula, entry by entry."""
    return sum(
        weights[:, k : k + 1]
        * torch.einsum(
            "ni,nid->nd",
            F.silu(torch.einsum("nd,ndi->ni", x, gate[chosen[:, k]]))
            * torch.einsum("nd,ndi->ni", x, up[chosen[:, k]]),
            down[chosen[:, k]],
        )
        for k in range(chosen.shape[1])
    )


def far(found, expected) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("cap_ratio", [None, 0.5])
def test_the_expert_layer_and_its_gradients_are_those_of_the_formula(cap_ratio):
    torch.manual_seed(0)
    layer, chosen = Experts(SMALL), torch.randn(40, 8).topk(2).indices
    layout = _lay_out(chosen, 8, cap_ratio)
    assert layout.held.all() == (cap_ratio is None)
    leaves = [
        torch.randn(40, 32),
        torch.rand(40, 2),
        layer.gate.detach(),
        layer.up.detach(),
        layer.down.detach(),
    ]
    x, weights, gate, up, down = (leaf.clone().requires_grad_() for leaf in leaves)
    found = _Experts.apply(x, weights, gate, up, down, layout)
    gradient = torch.randn(40, 32)
    found.backward(gradient)
    own = [leaf.grad for leaf in (x, weights, gate, up, down)]
    x, weights, gate, up, down = (leaf.clone().requires_grad_() for leaf in leaves)
    # Entries over the cap count for nothing.
    expected = plain(x, weights * layout.held, chosen, gate, up, down)
    expected.backward(gradient)
    assert far(found, expected) < CLOSE
    assert [far(a, leaf.grad) < CLOSE for a, leaf in zip(own, (x, weights, gate, up, down), strict=True)] == [
        True
    ] * 5


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "_SAVE_EVERY_STEPS", 3)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    train(TEXT, TEXT, whole, PLAN)
    at_step, real = [], fit._train_step

    def dies_at_five(*args):
        at_step.append(1)
        if len(at_step) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(fit, "_train_step", dies_at_five)
    with pytest.raises(KeyboardInterrupt):
        train(TEXT, TEXT, stopped, PLAN)
    monkeypatch.setattr(fit, "_train_step", real)
    train(TEXT, TEXT, stopped, PLAN)
    first, second = (torch.load(f / CHECKPOINT, weights_only=True)["network"] for f in (whole, stopped))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(RunError, match="another plan"):
        train(TEXT, TEXT, stopped, replace(PLAN, seed=1))


@pytest.mark.slow
def test_the_exported_file_gives_the_networks_loss(tmp_path):
    from simlab.record.llama import Llama, log_probability

    network = train(TEXT, TEXT, tmp_path, PLAN)
    export(tmp_path / CHECKPOINT, tmp_path / "small.gguf", SMALL, PLAN.context)
    llama = Llama(tmp_path / "small.gguf", n_threads=1)
    text = TEXT[: PLAN.context]
    tokens = llama.tokenize(text)
    assert tokens == as_ids(text).tolist()
    assert llama.n_ctx_train == PLAN.context
    logits = llama.decode(tokens, 0, output_all=True)
    llama.close()
    assert logits is not None
    own = [-log_probability(row, token) for row, token in zip(logits, tokens[1:], strict=False)]
    assert np.mean(own) == pytest.approx(held_out_nll(network, as_ids(text), PLAN.context).mean(), abs=0.02)


def test_the_corpus_holds_out_whole_documents(tmp_path, monkeypatch):
    sources, library = tmp_path / "_sources", tmp_path / "lib"
    sources.mkdir()
    (library / "test").mkdir(parents=True)
    for i in range(100):
        (sources / f"{i}.rst.txt").write_text(f"document {i:04}\n" * 300)
    (library / "module.py").write_text("kept = 1\n")
    (library / "test" / "other.py").write_text("left_out = 1\n")
    monkeypatch.setattr("simlab.train.corpus.sysconfig.get_path", lambda _name: str(library))
    text, held_out = build_corpus(tmp_path / "out", sources)
    kept, held = ({line for line in part.splitlines() if line} for part in (text, held_out))
    assert (len(kept), len(held), kept & held) == (99, 2, set())
    assert b"left_out = 1" not in kept | held
    assert (tmp_path / "out" / "train.bin").read_bytes() == text
    write_texts(tmp_path / "out", held_out)
    assert (tmp_path / "out" / "heldout.txt").read_bytes() == held_out


def test_an_untrained_network_is_no_better_than_guessing():
    torch.manual_seed(0)
    nll = held_out_nll(Network(SMALL, 32), as_ids(TEXT), 32)
    assert nll.mean() == pytest.approx(np.log(SMALL.vocabulary), rel=0.5)
