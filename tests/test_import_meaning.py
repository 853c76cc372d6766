"""What a dump means, where it does not say so: dense layers, axes, logits before a sigmoid, a bias, a lost routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_files import (
    FACTS,
    N_EXPERT,
    RUN,
    SCORED,
    arrays_with,
    csv_bytes,
    dump,
    list_rows,
    load,
    npy_bytes,
    npz_bytes,
    plain,
    replayed,
)

from simlab.errors import InputError, SimlabWarning
from simlab.trace.store import Trace

SIGMOID = FACTS | {"gating": "sigmoid", "score_space": "raw"}
GATE = (1 / (1 + np.exp(-RUN["logits"]))).astype(np.float32)
BIAS = np.linspace(-0.5, 0.5, N_EXPERT, dtype=np.float32)
BIASED = {"ids": np.argsort(-(GATE + BIAS), axis=2)[..., :2], "scores": GATE + BIAS}


def figures(trace: Trace, **cell: Any) -> tuple[int, int, int]:
    """Lookups and misses at two cycles, and the bytes of a cycle."""
    numbers = replayed(trace, **cell)[0].all
    return numbers.lookups, numbers.misses, trace.header.cycle_bytes()


# -- dense layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placeholder", [0, -1, N_EXPERT])
def test_dense_layers_dumped_as_placeholders_are_named_and_left_out(placeholder: int, tmp_path: Path) -> None:
    """Layers 0 and 4 are dense: counted, they hit at every token and make a cycle longer."""
    dense = np.full_like(RUN["ids"][:, :1], placeholder)
    ids = np.concatenate([dense, RUN["ids"], dense], axis=1)
    said = "layers 0, 4 say expert 0, or padding, in every slot of every token, as dense layers are dumped; left out"
    with pytest.warns(SimlabWarning, match=said):
        trace = load(tmp_path, ("ids.npy", npy_bytes(ids)), **FACTS)
    assert (trace.header.moe_layers, trace.header.n_layer) == ((1, 2, 3), 5)
    found = figures(trace)
    assert found == figures(load(tmp_path, ("ids.npy", npy_bytes(RUN["ids"])), **FACTS))
    assert found[2] == 3 * 2 * 1000
    rows = list_rows({"ids": ids}, ("ids",))
    with pytest.warns(SimlabWarning, match="layers 0, 4 say expert 0"):
        assert figures(load(tmp_path, ("run.csv", csv_bytes(rows)), **FACTS)) == found


def test_moe_layers_are_picked_from_all_layers(tmp_path: Path) -> None:
    dense = np.zeros_like(RUN["ids"][:, :1])
    ids = np.concatenate([dense, RUN["ids"]], axis=1)
    whole = figures(load(tmp_path, ("ids.npy", npy_bytes(RUN["ids"])), **FACTS))
    files = [("ids.npy", npy_bytes(ids)), ("run.csv", csv_bytes(list_rows({"ids": ids}, ("ids",))))]
    for file in files:
        trace = load(tmp_path, file, **FACTS, moe_layers="1-3")
        assert (trace.header.moe_layers, figures(trace)) == ((1, 2, 3), whole)
        with pytest.warns(
            SimlabWarning, match="layer 2 route experts, are not among the --moe-layers, and left out"
        ):
            assert load(tmp_path, file, **FACTS, moe_layers="1,3").header.moe_layers == (1, 3)
        with pytest.raises(InputError, match=r"--moe-layers: layer 0 of .* say expert 0, or padding"):
            load(tmp_path, file, **FACTS, moe_layers="0-1")
    with pytest.raises(InputError, match="--moe-layers: none of them is in"):
        load(tmp_path, files[1], **FACTS, moe_layers="7")


def test_a_dense_layer_of_a_top_1_dump(tmp_path: Path) -> None:
    """Of one slot, expert 0 may be meant: only of many tokens is it a placeholder."""
    run = dump(tokens=20, k=1)["ids"]
    ids = np.concatenate([run, np.zeros_like(run[:, :1])], axis=1)
    with pytest.warns(SimlabWarning, match="layer 3 say expert 0"):
        assert load(tmp_path, ("ids.npy", npy_bytes(ids)), **FACTS).header.moe_layers == (0, 1, 2)
    assert load(tmp_path, ("ids.npy", npy_bytes(ids[:9])), **FACTS).header.moe_layers == (0, 1, 2, 3)


# -- axes ------------------------------------------------------------------------------------------------------


def swapped(run: dict[str, np.ndarray]) -> tuple[str, bytes]:
    return "run.npz", npz_bytes({name: values.swapaxes(0, 1).copy() for name, values in plain(run).items()})


def test_more_layers_than_tokens_ask_for_axes(tmp_path: Path) -> None:
    file = swapped(RUN)
    why = r"of shape \[3, 7, 2\], and axes that look like \[layers, tokens, k\]: more layers than tokens; say --axes"
    with pytest.raises(InputError, match=why):
        load(tmp_path, file, **SCORED)
    trace = load(tmp_path, file, **SCORED, axes="layers,tokens,k")
    whole = load(tmp_path, arrays_with(), **SCORED)
    assert trace.routing.collect().equals(whole.routing.collect())
    # A short run of a deep model is legal, where somebody says so or names as many layers.
    for facts in ({"axes": "tokens,layers,k"}, {"n_layer": 7}, {"expert_bytes": [9] * 7}):
        assert len(load(tmp_path, file, **SCORED | facts).header.moe_layers) == 7


def test_named_layers_that_are_the_first_axis_ask_for_axes(tmp_path: Path) -> None:
    file = swapped(dump(tokens=4, layers=6))
    for facts in ({"n_layer": 6}, {"expert_bytes": [9] * 6}, {"moe_layers": "1-6"}):
        with pytest.raises(
            InputError, match=r"look like \[layers, tokens, k\]: 6 layers are named; say --axes"
        ):
            load(tmp_path, file, **SCORED | facts)


def test_tokens_that_route_as_their_neighbours_tell_the_axes(tmp_path: Path) -> None:
    """40 layers of 30 tokens, each token with three of the four experts of the one before it."""
    rng = np.random.default_rng(2)
    ids = np.empty((30, 40, 4), np.int32)
    ids[0] = [rng.permutation(64)[:4] for _ in range(40)]
    for token in range(1, 30):
        for layer in range(40):
            kept = rng.permutation(ids[token - 1, layer])[:3]
            new = rng.choice(np.setdiff1d(np.arange(64), ids[token - 1, layer]))
            ids[token, layer] = [*kept, new]
    facts = {"n_expert": 64, "expert_bytes": 9, "prefill": 2}
    file = ("ids.npy", npy_bytes(ids.swapaxes(0, 1).copy()))
    why = r"neighbours along the second axis share 3\.00 of 4 experts, along the first 0\.\d\d; say --axes"
    with pytest.raises(InputError, match=why):
        load(tmp_path, file, **facts)
    assert len(load(tmp_path, file, **facts, axes="layers,tokens,k").header.moe_layers) == 40
    # More layers than tokens, but the right way round.
    trace = load(tmp_path, ("ids.npy", npy_bytes(ids)), **facts, n_layer=40)
    assert len(trace.header.moe_layers) == 40


def test_axes_are_of_arrays(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--axes: .*run.csv is no array"):
        load(tmp_path, ("run.csv", csv_bytes(list_rows(RUN))), **SCORED, axes="layers,tokens,k")
    with pytest.raises(InputError, match='--axes: "k", must be one of tokens,layers,k, layers,tokens,k'):
        load(tmp_path, arrays_with(), **SCORED, axes="k")


# -- sigmoids and biases ---------------------------------------------------------------------------------------


def test_logits_before_a_sigmoid_are_refused(tmp_path: Path) -> None:
    """Without a weight rule too: the mass of logits, taken as shares, is no probability."""
    given = {"ids": RUN["ids"], "scores": RUN["logits"]}
    with pytest.raises(InputError, match=r"array 'scores', token 0, .*outside 0 to 1, so it is a logit, or"):
        load(tmp_path, ("run.npz", npz_bytes(given)), **SIGMOID)
    with pytest.raises(InputError, match=r"'gate_probs', .*above 1, and no gate is; are these logits"):
        load(tmp_path, ("run.npz", npz_bytes(given | {"gate_probs": np.exp(RUN["logits"])})), **SIGMOID)
    trace = load(tmp_path, ("run.npz", npz_bytes(given | {"gate_probs": GATE})), **SIGMOID)
    assert not trace.header.selection_bias
    assert replayed(trace)[0].decode.mass_displaced == 0


def test_a_stated_bias_ranks_and_gives_no_mass(tmp_path: Path) -> None:
    facts = SIGMOID | {"selection_bias": True}
    trace = load(tmp_path, ("run.npz", npz_bytes(BIASED)), **facts)
    assert trace.header.selection_bias
    found = replayed(trace, margins=["0.5"])[0].decode
    assert found.substituted
    assert found.score_regret
    assert found.mass_displaced is None
    with pytest.raises(
        InputError, match="--weight-rule: weights are not made of biased scores; give gate_probs"
    ):
        load(tmp_path, ("run.npz", npz_bytes(BIASED)), **facts, weight_rule={})
    with pytest.raises(InputError, match="--selection-bias: biased scores are no probabilities"):
        load(tmp_path, arrays_with(), **SCORED, selection_bias=True)


def test_mass_is_of_the_gate_and_not_of_what_was_sorted(tmp_path: Path) -> None:
    """One token, one layer: the bias puts expert 2 first, k = 1; a margin of 1 takes the resident one."""
    gate = np.array([0.1, 0.3, 0.2, 0.4], np.float32)
    scores = gate + np.array([0.0, 0.1, 0.9, 0.0], np.float32)
    ids = np.array([1, 2], np.int32)
    arrays = {
        "ids": ids.reshape(2, 1, 1),
        # The first token has it that expert 1 is picked, and is in RAM when the second comes.
        "scores": np.stack([np.roll(scores, -1), scores])[:, None],
        "gate_probs": np.stack([np.roll(gate, -1), gate])[:, None],
    }
    facts = {"n_expert": 4, "expert_bytes": 9, "prefill": 1, "gating": "sigmoid", "score_space": "raw"}
    trace = load(tmp_path, ("run.npz", npz_bytes(arrays)), **facts)
    found = replayed(trace, margins=["1"])[0].decode
    assert found.substituted == 1
    # 0.2 of expert 2 lost, 0.3 of expert 1 gained, of a sum of 1; of the sorted scores it were (1.1 - 0.4) / 2.
    assert found.mass_displaced == pytest.approx(0.2 - 0.3, abs=1e-7)


# -- routings that are not there ---------------------------------------------------------------------------------


def test_a_token_without_a_layer_is_said(tmp_path: Path) -> None:
    rows = [r for r in list_rows(RUN, ("ids",)) if (r["token"], r["layer"]) != (4, 1)]
    with pytest.warns(SimlabWarning, match=r"token 4 has no routing of layer 1 \(1 are missing in all\)"):
        load(tmp_path, ("run.csv", csv_bytes(rows)), **FACTS)


def test_positions_that_go_back_or_jump(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'step' of token 4: 2 after 3; the positions of a turn go up"):
        load(tmp_path, arrays_with(position=np.array([0, 1, 2, 3, 2, 5, 6])), **SCORED)
    with pytest.warns(SimlabWarning, match=r"'step' of token 4: 6 after 3 \(1 such places in all\)"):
        load(tmp_path, arrays_with(position=np.array([0, 1, 2, 3, 6, 7, 8])), **SCORED)


# -- the policy of the run ---------------------------------------------------------------------------------------


def test_of_a_stated_substitution_the_scores_say_what_the_router_picked(tmp_path: Path) -> None:
    ran = RUN["ids"].copy()
    ran[5, 1] = [e for e in range(N_EXPERT) if e not in RUN["ids"][5, 1]][:2]
    given = ("run.npz", npz_bytes({"ids": ran, "scores": RUN["scores"]}))
    with pytest.warns(SimlabWarning, match="the experts are not the best of the row's scores"):
        load(tmp_path, given, **SCORED)
    trace = load(tmp_path, given, **SCORED, route="substitute:L=.15")
    header = trace.header
    assert (header.route, header.knobs, header.router_known) == ("substitute", {"L": 0.15}, True)
    row = trace.routing.filter(step=5, layer=1).collect()
    assert row["router_experts"][0].to_list() == RUN["ids"][5, 1].tolist()
    assert row["experts"][0].to_list() == ran[5, 1].tolist()
    without = load(tmp_path, ("ids.npy", npy_bytes(ran)), **FACTS, route="substitute:L=.15")
    assert not without.header.router_known
    assert replayed(without)[0].decode.substituted is None
