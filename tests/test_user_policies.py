"""Policies users write: every mistake is one line that names the file, and what works live works in a replay.

A mistake is found where it can be: in the declaration, in a dry run before anything is read or written, or where
numba compiles it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import generate, make_header

from simlab.cells import MIB, build_cells, parse_budget, parse_route, resolve_budget
from simlab.cli.main import main
from simlab.errors import InputError
from simlab.learning import learn
from simlab.policy import eviction, find_eviction, routing
from simlab.policy_check import check_policy
from simlab.record.cache import LiveCache
from simlab.record.live_route import LiveRoute
from simlab.replay.run import Replayer, sweep
from simlab.replay.slots import replay_slots, slot_table
from simlab.trace.store import open_trace
from simlab.types import Knob, Rerank, WeightRule

TRACE = Path(__file__).parent.parent / "traces" / "original.trace"
HEADER = make_header(n_layer=2, n_expert=10, k=3)

HEAD = "import sys\nimport numpy as np\nfrom simlab.policy import eviction, routing, queue\n"
HEAD += "from simlab.types import Knob, Rerank, Swap\nfrom simlab.xp import where\n"


def rerank_of(body: str, declared: str = '"rerank", needs={"scores"}') -> str:
    return f"@routing({declared})\ndef mine(candidate, row, state, knobs):\n    {body}\n"


def width_of(body: str, declared: str = '"width"') -> str:
    return f"@routing({declared})\ndef mine(k, knobs):\n    {body}\n"


def evict_of(body: str, declared: str = '"dynamic"') -> str:
    touch = "def touch(state, access, knobs):\n    return (state[0] + access.first,)\n\n"
    return f"{touch}@eviction({declared})\ndef mine(entry, state, knobs):\n    {body}\n"


LEARNED = "from simlab.types import Learned\n\ndef train(training):\n    return {}\n\n"
UPDATE = "def update(row, state, knobs):\n    return (state[0] + 1,)\n\n"
COUNTING = '"static", touch=touch, state={"n": 0}'
CHOICE = "return Rerank(candidate.value, 0, True)"

BAD_ROUTES = {
    "raises": (rerank_of("return Rerank(candidate.valu, 0, True)"), "line 8: raised AttributeError"),
    "wrong shape": (rerank_of("return Rerank(candidate.value[:2], 0, True)"), r"has shape \(2,\)"),
    "branches": (
        rerank_of(f"if candidate.value > 1:\n        {CHOICE}\n    {CHOICE}"),
        "branches on a value",
    ),
    "nothing": (rerank_of("pass"), r"must return Rerank\(value, tier, active\), not None"),
    "xp": (
        '@routing("rerank")\ndef mine(xp, candidates, row, state, knobs):\n    pass\n',
        r"takes xp, which policies no longer do; it must take \(candidate, row, state, knobs\)",
    ),
    "arity": (
        '@routing("rerank")\ndef mine(candidate, row):\n    pass\n',
        r"takes \(candidate, row, state, knobs\)",
    ),
    "stage": (rerank_of(CHOICE, '"rerun"'), "stage 'rerun' must be one of width, rerank, swap, drop"),
    "no parentheses": (rerank_of(CHOICE).replace('("rerank", needs={"scores"})', ""), "write @routing"),
    "state without update": (
        rerank_of(CHOICE, '"rerank", state={"seen": 0}'),
        "update says how state changes; give both or neither",
    ),
    "missing state": (
        UPDATE.replace("(state[0] + 1,)", "()")
        + rerank_of(CHOICE, '"rerank", state={"seen": 0}, update=update'),
        r"must be a tuple of what it declared \(seen\), not a tuple of 0",
    ),
    "knob": (rerank_of(CHOICE, '"rerank", knobs={"a": 3}'), "knob a must be a Knob"),
    "knob range": (rerank_of(CHOICE, '"rerank", knobs={"a": Knob(3, 0, 1)}'), "low <= default <= high"),
    "knobs": (rerank_of(CHOICE, '"rerank", knobs=[Knob(3, 0, 1)]'), "knobs must be a mapping"),
    "float tier": (
        rerank_of("return Rerank(candidate.value, 0.5, True)"),
        "tier must be whole numbers, not float64",
    ),
    "active per candidate": (
        rerank_of("return Rerank(candidate.value, 0, candidate.resident)"),
        "Rerank.active has shape",
    ),
    "float active": (
        rerank_of("return Rerank(candidate.value, 0, row.range)"),
        "must be bool, one per row, not float32",
    ),
    "float drop": (rerank_of("return candidate.weight", '"drop"'), "must be bool, not float32"),
    "swap as a rerank": (
        rerank_of(CHOICE, '"swap"'),
        r"must return Swap\(replace, value, active\), not a Rerank",
    ),
    "not ordered": (
        rerank_of("return Rerank(-candidate.value, 0, True)", '"rerank", needs={"scores"}, ordered=True'),
        "is declared ordered, but puts the lower of two scores first",
    ),
    "lighter of experts": (
        rerank_of(CHOICE, '"rerank", needs={"lighter"}'),
        "needs 'lighter' must be a set of mass, rank, scores, weights in a rerank policy",
    ),
    "mass of slots": (rerank_of(CHOICE, '"drop", needs={"mass"}'), "in a drop policy"),
    "learns without train": (
        LEARNED + rerank_of(CHOICE, '"rerank", learns={"a": Learned("expert")}'),
        "learns says what train returns; give both or neither",
    ),
    "learns what": (
        LEARNED + rerank_of(CHOICE, '"rerank", learns={"a": Learned("token")}, train=train'),
        "learns a must be a Learned.per. of layer, expert, pair",
    ),
    "pairs of a rerank": (
        LEARNED + rerank_of(CHOICE, '"rerank", learns={"a": Learned("pair")}, train=train'),
        "per pair of experts, which only a swap policy is shown",
    ),
    "not learned": (
        LEARNED
        + rerank_of(
            "return Rerank(candidate.learned.b, 0, True)",
            '"rerank", learns={"a": Learned("expert")}, train=train',
        ),
        "asks for candidate.learned.b, which it does not declare; it learns a",
    ),
    "untrained": (
        LEARNED + rerank_of(CHOICE, '"rerank", learns={"a": Learned("expert")}, train=train'),
        "learns 'a' from a part of a trace; give one with --train 25%",
    ),
    "not compiled": (
        rerank_of("return Rerank(np.partition(candidate.value, 1), 0, True)"),
        "cannot be compiled; compute with operators, comparisons and simlab.xp",
    ),
    "width 0": (width_of("return 0"), "between 1 and this model's 64 experts"),
    "width 65": (width_of("return 65"), "between 1 and .* 65 experts per token"),
    "no width": (width_of("pass"), "must be a whole number, not None"),
    "float width": (width_of("return 2.5"), "must be a whole number, not float64"),
    "width by scores": (width_of("return 2", '"width", needs={"scores"}'), "one k for the whole"),
    "needs": (
        rerank_of(CHOICE, '"rerank", needs={"score"}'),
        "must be a set of mass, rank, scores, weights in a rerank",
    ),
    "needs a word": (rerank_of(CHOICE, '"rerank", needs="scores"'), "needs 'scores' must be a set"),
    "unknown argument": (rerank_of(CHOICE, '"rerank", need={"scores"}'), "TypeError.*need"),
    "exits": ("sys.exit()\n", "SystemExit"),
    "exits later": (rerank_of("sys.exit()"), "raised SystemExit"),
    "syntax": ("def mine(:\n", "SyntaxError.*line 6"),
    "no policy": ("x = 1\n", "holds no policy"),
    "unknown knob": (
        rerank_of(
            "return Rerank(candidate.value * knobs.b, 0, True)", '"rerank", knobs={"a": Knob(1, 0, 2)}'
        ),
        "line 8: asks for knob 'b', which it does not declare; it declares a",
    ),
    "in place": (
        rerank_of(f"candidate.value[0] = 1\n    {CHOICE}"),
        "line 8: raised ValueError: assignment destination is read-only",
    ),
    "async": (rerank_of(CHOICE).replace("def mine", "async def mine"), "a policy is one plain function"),
    "several lines": (rerank_of("raise ValueError('one\\ntwo')"), "raised ValueError: one two"),
}

BAD_EVICTIONS = {
    "raises": (evict_of("return state[0]"), "line 11: raised IndexError"),
    "bool key": (evict_of("return entry.position > 3"), "must be a number, not bool"),
    "text key": (evict_of("return 'old'"), "must be a number, not a str"),
    "no key": (evict_of("pass"), "must be a number, not None"),
    "shape": (evict_of("return entry.position[:2]"), r"has shape \(2,\)"),
    "branches": (
        evict_of("return entry.position if entry.position > 2 else -entry.position"),
        "branches on a value",
    ),
    "arity": ('@eviction("static")\ndef mine(entry):\n    return 0\n', "entry, state, knobs"),
    "kind": (evict_of("return entry.batch", '"queue"'), "kind 'queue' must be static or dynamic"),
    "not static": (
        evict_of("return entry.batch - entry.position", '"static"'),
        "is declared static, but its key changes",
    ),
    "touch's arity": (
        evict_of("return entry.batch", '"dynamic", touch=lambda a: ()'),
        "touch must be a function that takes",
    ),
    "touch's state": (
        evict_of("return state[0]", COUNTING).replace("(state[0] + access.first,)", "()"),
        r"what touch returns must be a tuple of what it declared \(n\), not a tuple of 0",
    ),
    "touch returns nothing": (
        evict_of("return state[0]", COUNTING).replace("return (state", "(state"),
        "declared .* not None",
    ),
    "not compiled": (
        evict_of("return np.partition(entry.position, 1)"),
        "cannot be compiled; compute with operators",
    ),
    "queue not compiled": (
        "@queue()\ndef mine(cache, knobs):\n    cache.nothing()\n",
        "policy mine@.*my_bad.py: line 8: cannot be compiled",
    ),
    "no parentheses": (
        evict_of("return entry.batch").replace('@eviction("dynamic")', "@eviction"),
        "write @eviction",
    ),
}

BAD = [("--route", name, *rest) for name, rest in BAD_ROUTES.items()]
BAD += [("--evict", name, *rest) for name, rest in BAD_EVICTIONS.items()]


@pytest.mark.parametrize(("option", "name", "source", "message"), BAD, ids=[f"{b[0]} {b[1]}" for b in BAD])
def test_a_mistake_is_one_line_naming_the_file(option, name, source, message, tmp_path, capsys):
    path = tmp_path / "my_bad.py"
    path.write_text(HEAD + source)
    assert main(["replay", str(TRACE), "--budget", "25%", option, str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("simlab: error: ")
    assert "my_bad.py" in lines[0]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(lines[0])


def test_control_c_in_a_file_stays_one(tmp_path, capsys):
    path = tmp_path / "interrupted.py"
    path.write_text("raise KeyboardInterrupt\n")
    assert main(["replay", str(TRACE), "--budget", "25%", "--route", str(path)]) == 130
    assert capsys.readouterr().err == "simlab: interrupted\n"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{}", "what train returns must be a dict of a, not nothing"),
        (
            '{"a": training.counts[:1]}',
            r"'a' has shape \(1, 64\), declared per expert it must have \(\d+, 64\)",
        ),
        ('{"a": training.count}', "line 9: raised AttributeError"),
        ('{"a": training.counts * np.nan}', "'a' holds NaN"),
    ],
)
def test_wrong_learning_is_one_line_naming_the_file(returned, message, tmp_path, capsys):
    path = tmp_path / "my_learner.py"
    learner = LEARNED.replace("return {}", f"return {returned}")
    path.write_text(
        HEAD + learner + rerank_of(CHOICE, '"rerank", learns={"a": Learned("expert")}, train=train')
    )
    assert main(["replay", str(TRACE), "--budget", "25%", "--route", str(path), "--train", "same"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(lines[0])


def test_a_policy_that_learns_is_given_its_layer_in_a_replay_and_live(tmp_path):
    """It prefers what the training part picked most; live it is given the same numbers."""
    path = tmp_path / "popular.py"
    learner = LEARNED.replace("return {}", 'return {"a": training.counts}')
    body = "return Rerank(candidate.learned.a, 0, True)"
    path.write_text(
        HEAD + learner + rerank_of(body, '"rerank", learns={"a": Learned("expert")}, train=train')
    )
    trace = generate(HEADER, seed=6, n_decode=30).write(tmp_path / "t")
    cell = build_cells(budgets=["40%"], routes=[str(path)])[0]
    replayer = Replayer(trace, [cell], detail=True, train="same")
    while replayer.advance():
        pass
    assert replayer.training is not None
    counts, table = replayer.training.counts, slot_table(replayer, 0)
    learned = learn(cell.route.steps, replayer.training, 2, 10)
    live = LiveRoute(cell.route, 3, 10, 2, "prob", WeightRule(), "softmax", learned)
    for layer in range(2):
        best = set(np.lexsort((np.arange(10), -counts[layer]))[:3].tolist())
        of_layer = table.filter((table["layer"] == layer) & (table["phase"] == 1))
        assert set(of_layer["expert"].to_list()) == best
        router = np.array([[e for e in range(10) if e not in best][:3]], np.int32)
        found = live.rerank(layer, np.full((1, 10), 0.1, np.float32), router, np.zeros(10, bool))
        assert set(found.experts[0].tolist()) == best


GOOD = {
    "width": width_of("return k // 2"),
    "rerank": UPDATE
    + rerank_of(
        "return Rerank(-candidate.rank, candidate.resident, True)",
        '"rerank", needs={"rank"}, state={"n": 0}, update=update',
    ),
    "swap": rerank_of("return Swap(~candidate.resident, -candidate.mass, True)", '"swap", needs={"mass"}'),
    "drop": rerank_of("return ~candidate.resident", '"drop"'),
}


@pytest.mark.parametrize("stage", GOOD)
def test_a_good_one_of_every_stage(stage, tmp_path, capsys):
    path, evict = tmp_path / f"my_{stage}.py", tmp_path / "my_evict.py"
    path.write_text(HEAD + GOOD[stage])
    evict.write_text(HEAD + evict_of("return state[0]", COUNTING))
    words = ["--budget", "25%", "--route", str(path), "--evict", str(evict), "--json"]
    assert main(["replay", str(TRACE), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["route"] == f"mine@my_{stage}.py"
    assert (found["margin"], found["drop"]) == (None, None)
    assert found["top_k"] == (4 if stage == "width" else 8)
    done = {"width": "slots", "rerank": "substituted", "swap": "substituted", "drop": "dropped"}[stage]
    assert found["decode"][done] > 0


def test_the_same_name_is_not_the_same_policy(tmp_path):
    """Two files that define `mine` have numbers of their own."""
    for name, body in (("one", "candidate.value"), ("two", "-candidate.value")):
        (tmp_path / f"{name}.py").write_text(HEAD + rerank_of(f"return Rerank({body}, 0, True)"))
    trace = generate(HEADER, seed=3).write(tmp_path / "t")
    cells = build_cells(budgets=["40%"], routes=[str(tmp_path / "one.py"), str(tmp_path / "two.py")])
    one, two = sweep(trace, cells)
    assert one.decode.substituted == 0 < two.decode.substituted


def test_policies_that_share_a_key_but_not_a_touch_are_apart(tmp_path):
    for name, sign in (("up", "+"), ("down", "-")):
        text = evict_of("return state[0]", COUNTING).replace("+ access", f"{sign} access")
        (tmp_path / f"{name}.py").write_text(HEAD + text)
    trace = generate(HEADER, seed=4).write(tmp_path / "t")
    cells = build_cells(budgets=["40%"], evicts=[str(tmp_path / "up.py"), str(tmp_path / "down.py")])
    least, most = sweep(trace, cells)
    assert least.decode.misses != most.decode.misses


# -- live ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "budget"),
    [
        ("0", "40%"),
        ("1.5", "4/layer"),
        ("where(entry.position % 2 == 0, np.nan, 1.0)", "40%"),
    ],
)
def test_any_key_evicts_the_same_live_as_in_a_replay(key, budget, tmp_path):
    """A constant key leaves the choice to recency; NaN goes first."""
    path = tmp_path / "key.py"
    path.write_text(HEAD + evict_of(f"return {key}"))
    trace = generate(HEADER, seed=5, n_decode=60).write(tmp_path / "t")
    cell = build_cells(budgets=[budget], evicts=[str(path)])[0]
    found = replay_slots(trace, cell)
    policy = find_eviction(str(path))
    layers = HEADER.moe_layers
    sizes = np.array([HEADER.entry_bytes[i] for i in layers])
    resolved = resolve_budget(parse_budget(budget), "global", HEADER, HEADER.n_expert_used)
    live = LiveCache(sizes, HEADER.n_expert, HEADER.n_expert_used, resolved, policy, {})
    evictions = misses = 0
    for _, batch in found.slots.group_by("graph", "layer", maintain_order=True):
        walk = batch["expert"].to_numpy().reshape(-1, HEADER.n_expert_used).astype(np.int32)
        outcome = live.run_batch(layers.index(batch["layer"][0]), walk, None, np.ones(walk.shape, np.float32))
        evictions, misses = evictions + len(outcome.evicted), misses + len(outcome.misses)
    assert evictions == found.numbers.all.evictions > 0
    assert misses == found.numbers.all.misses


def live_route(path: Path) -> LiveRoute:
    return LiveRoute(parse_route(str(path)), 3, 10, 2, "raw", WeightRule())


def test_a_wrong_policy_opens_no_live_route_and_no_cache():
    """Policies made in code, which no file check has seen."""

    @routing("drop")
    def floating(candidate, row, state, knobs):
        return candidate.weight

    @eviction("static")
    def boolean(entry, state, knobs):
        return entry.position > 0

    with pytest.raises(InputError, match=r"floating@test_user_policies.py: .* must be bool"):
        check_policy(floating)
    budget = resolve_budget(parse_budget(f"{1000 / MIB}MiB"), "global", HEADER, 3)
    with pytest.raises(InputError, match=r"boolean@test_user_policies.py: .* must be a number"):
        LiveCache(np.array([7, 7]), 10, 3, budget, boolean, {})


def test_a_recording_of_a_wrong_policy_writes_nothing(tmp_path, capsys):
    pytest.importorskip("llama_cpp")
    path, out = tmp_path / "my_recorded.py", tmp_path / "out.trace"
    path.write_text(HEAD + rerank_of("return Rerank(None, 0, True)"))
    words = ["record", "--out", str(out), "--prompt", "x", "-n", "4", "--budget", "25%"]
    assert main([*words, "--route", str(path)]) == 2
    out_text, err = capsys.readouterr()
    assert out_text == ""
    assert err.startswith("simlab: error: policy mine@my_recorded.py: Rerank.value must be numbers")
    assert not out.exists()


def test_declarations_made_in_code_are_checked_too():
    with pytest.raises(InputError, match="policy wrong: knob a must be a Knob"):

        @routing("rerank", knobs={"a": 1})  # pyright: ignore
        def wrong(candidate, row, state, knobs):
            return Rerank(candidate.value, 0, True)

    with pytest.raises(InputError, match="a policy is one plain function"):
        routing("rerank", knobs={"a": Knob(0, 0, 1)})(print)  # pyright: ignore


def test_tiers_values_and_state_of_any_number_type_live(tmp_path):
    """What the dry run lets through, the live driver takes: bool tiers, int values, Python numbers as state."""
    path = tmp_path / "loose.py"
    path.write_text(HEAD + GOOD["rerank"].replace("state[0] + 1", "1"))
    route = live_route(path)
    scores = np.arange(10, 0, -1, dtype=np.float32)[None]
    resident = np.zeros(10, bool)
    resident[[1, 7]] = True
    found = route.rerank(0, scores, np.arange(3, dtype=np.int32)[None], resident)
    assert found.experts.tolist() == [[1, 7, 0]]
    assert route.rerank(0, scores, np.arange(3, dtype=np.int32)[None], resident).substituted == 1


HALF = HEAD + (
    '@routing("width", knobs={"extra": Knob(0, 0, 99, integer=True)})\n'
    "def half(k, knobs):\n    return k // 2 + knobs.extra\n"
)


@pytest.fixture
def half(tmp_path, monkeypatch):
    """A width policy with no knob `k`, and a text to run; returns the words that both commands share."""
    pytest.importorskip("llama_cpp")
    monkeypatch.chdir(tmp_path)
    Path("half.py").write_text(HALF)
    Path("text.txt").write_bytes(b"def first(values):\n    return values[0]\n")
    return ["--text", "text.txt", "--budget", "2cycles", "--threads", "1"]


def test_a_width_without_a_knob_k_is_recorded_and_scored(half, capsys):
    words = [*half, "--route", "half.py:extra=0"]
    assert main(["record", "--out", "half.trace", *words]) == 0
    trace = open_trace("half.trace")
    assert trace.width == 4
    assert trace.routing.collect()["experts"].to_numpy().min() >= 0
    capsys.readouterr()
    assert main(["ppl", "--json", *words, "--route", "top_k:k=8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["top_k"] for c in found] == [4, 8]


@pytest.mark.parametrize(
    ("extra", "word"), [(61, "must lie between 1 and this model's 64 experts"), (60, "has room for")]
)
@pytest.mark.parametrize("command", [["record", "--out", "no.trace"], ["ppl"]])
def test_a_width_too_large_names_what_asked_for_it(half, capsys, command, extra, word):
    assert main([*command, *half, "--route", f"half.py:extra={extra}"]) == 2
    error = capsys.readouterr().err
    assert f"--route half.py:extra={extra}: " in error
    assert word in error
    assert "--top-k" not in error
    assert not Path("no.trace").exists()


def test_a_replay_of_a_users_policy_asks_for_its_file(half, capsys):
    # Names of their own: two files of one name in a process are told apart by their folders.
    Path("once_recorded.py").write_text(HEAD + rerank_of(CHOICE))
    Path("once_kept.py").write_text(HEAD + evict_of("return state[0]", COUNTING))
    for option, file in (("--route", "once_recorded.py"), ("--evict", "once_kept.py")):
        assert main(["record", "--out", "t.trace", "--force", *half, option, file]) == 0
        capsys.readouterr()
        assert main(["replay", "t.trace"]) == 2
        error = capsys.readouterr().err
        assert f"was recorded under a policy file, {file}, which it does not carry" in error
        assert f"give that file with {option}" in error
        assert main(["replay", "t.trace", option, file]) == 0
        capsys.readouterr()
