"""Policies users write: every mistake is one line that names the file, and what works live works in a replay.

A mistake is found where it can be: in the declaration, in a dry run before anything is read or written, or
where only JAX's tracing shows it.
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
from simlab.routing import knob_values
from simlab.trace.store import open_trace
from simlab.types import Choice, Knob, WeightRule

TRACE = Path(__file__).parent.parent / "traces" / "original.trace"
HEADER = make_header(n_layer=2, n_expert=10, k=3)

HEAD = "import sys\nimport numpy as np\nfrom simlab.policy import eviction, routing\n"
HEAD += "from simlab.types import Choice, Knob\n"


def rerank_of(body: str, declared: str = '"rerank", needs={"scores"}') -> str:
    return f"@routing({declared})\ndef mine(xp, candidates, row, state, knobs):\n    {body}\n"


def evict_of(body: str, declared: str = "") -> str:
    touch = 'def touch(xp, state, access, knobs):\n    return {"n": state["n"] + access.first}\n\n'
    return f"{touch}@eviction({declared})\ndef mine(xp, state, last_position, batch, knobs):\n    {body}\n"


LEARNED = "from simlab.types import Learned\n\ndef train(training):\n    return {}\n\n"
COUNTING = 'touch=touch, state={"n": 0}'
CHOICE = "return Choice(value=candidates.value), state"

BAD_ROUTES = {
    "raises": (rerank_of("return Choice(value=candidates.valu), state"), "line 7: raised AttributeError"),
    "wrong shape": (rerank_of("return Choice(value=candidates.value[:2]), state"), r"has shape \(2,\)"),
    "fixed shape": (rerank_of("return Choice(value=xp.zeros(4)), state"), r"has shape \(4,\) where"),
    "branches": (rerank_of(f"if row.range > 1:\n        {CHOICE}\n    {CHOICE}"), "branches on a value"),
    "branches on a knob": (
        rerank_of(f"if knobs.a > 1:\n        {CHOICE}\n    {CHOICE}", '"rerank", knobs={"a": Knob(0, 0, 2)}'),
        "branches on a value.*xp.where",
    ),
    "no tuple": (rerank_of("return Choice(value=candidates.value)"), "must return .*, not a Choice alone"),
    "nothing": (rerank_of("pass"), r"must return \(Choice\(...\), state\), not None"),
    "arity": (
        '@routing("rerank")\ndef mine(xp, candidates, row):\n    pass\n',
        r"takes \(xp, candidates, row, state, knobs\)",
    ),
    "stage": (rerank_of(CHOICE, '"rerun"'), "stage 'rerun' must be one of width, rerank, swap, drop"),
    "no parentheses": (rerank_of(CHOICE).replace('("rerank", needs={"scores"})', ""), "write @routing"),
    "missing state": (
        rerank_of("return Choice(value=candidates.value), {}", '"rerank", state={"seen": 0}'),
        r"a dict of what it declared \(seen\), not a dict of nothing",
    ),
    "knob": (rerank_of(CHOICE, '"rerank", knobs={"a": 3}'), "knob a must be a Knob"),
    "knob range": (rerank_of(CHOICE, '"rerank", knobs={"a": Knob(3, 0, 1)}'), "low <= default <= high"),
    "knobs": (rerank_of(CHOICE, '"rerank", knobs=[Knob(3, 0, 1)]'), "knobs must be a mapping"),
    "empty choice": (rerank_of("return Choice(), state"), r"Choice\(value=...\) must be numbers, not None"),
    "float tier": (
        rerank_of("return Choice(value=candidates.value, tier=0.5), state"),
        "tier=.* must be whole numbers, not float64",
    ),
    "active per candidate": (
        rerank_of("return Choice(value=candidates.value, active=candidates.resident), state"),
        r"Choice\(active=...\) has shape",
    ),
    "float active": (
        rerank_of("return Choice(value=candidates.value, active=row.range), state"),
        "must be bool, one per row, not float32",
    ),
    "float drop": (
        rerank_of("return Choice(drop=candidates.weight), state", '"drop"'),
        "must be bool, not float32",
    ),
    "swap without flags": (
        rerank_of(CHOICE, '"swap", needs={"scores"}'),
        r"Choice\(replace=...\) must be bool, not None",
    ),
    "swap of wrong shape": (
        rerank_of("return Choice(replace=~candidates.resident, value=xp.zeros((3, 4))), state", '"swap"'),
        r"Choice\(value=...\) has shape \(3, 4\)",
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
            "return Choice(value=candidates.learned.b), state",
            '"rerank", learns={"a": Learned("expert")}, train=train',
        ),
        "asks for candidates.learned.b, which it does not declare; it learns a",
    ),
    "untrained": (
        LEARNED + rerank_of(CHOICE, '"rerank", learns={"a": Learned("expert")}, train=train'),
        "learns 'a' from a part of a trace; give one with --train 25%",
    ),
    "no drop": (rerank_of(CHOICE, '"drop"'), "drop=.* must be bool, not None"),
    "numpy": (
        rerank_of("return Choice(value=np.abs(candidates.value)), state"),
        "calls NumPy itself; use xp",
    ),
    "int()": (
        rerank_of("return Choice(value=candidates.value * int(row.layer)), state"),
        "makes a Python number of an array",
    ),
    "width 0": (rerank_of("return Choice(k=0), state", '"width"'), "between 1 and this model's 64 experts"),
    "width 65": (rerank_of("return Choice(k=65), state", '"width"'), "between 1 and .* 65 experts per token"),
    "no width": (rerank_of(CHOICE, '"width"'), "k=.* must be a whole number, not None"),
    "float width": (
        rerank_of("return Choice(k=2.5), state", '"width"'),
        "must be a whole number, not float64",
    ),
    "width by scores": (
        rerank_of("return Choice(k=2), state", '"width", needs={"scores"}'),
        "one k for the whole",
    ),
    "needs": (
        rerank_of(CHOICE, '"rerank", needs={"score"}'),
        "must be a set of mass, rank, scores, weights in a rerank",
    ),
    "needs a word": (rerank_of(CHOICE, '"rerank", needs="scores"'), "needs 'scores' must be a set"),
    "unknown argument": (rerank_of(CHOICE, '"rerank", need={"scores"}'), "TypeError.*need"),
    "exits": ("sys.exit()\n", "SystemExit"),
    "exits later": (rerank_of("sys.exit()"), "raised SystemExit"),
    "syntax": ("def mine(:\n", "SyntaxError.*line 5"),
    "no policy": ("x = 1\n", "holds no policy"),
    "unknown knob": (
        rerank_of(
            "return Choice(value=candidates.value * knobs.b), state", '"rerank", knobs={"a": Knob(1, 0, 2)}'
        ),
        "line 7: asks for knob 'b', which it does not declare; it declares a",
    ),
    "in place": (
        rerank_of(f"candidates.value[0] = 1\n    {CHOICE}"),
        "line 7: raised ValueError: assignment destination is read-only",
    ),
    "by chance": (
        rerank_of("return Choice(value=candidates.value + np.random.rand()), state"),
        "answers differently when it is asked the same again",
    ),
    "by a flipped coin": (
        rerank_of("return Choice(drop=candidates.resident & (np.random.rand() < 0.5)), state", '"drop"'),
        "answers differently",
    ),
    "by the clock": (
        "import time\n"
        + rerank_of("return Choice(value=candidates.value, tier=time.perf_counter_ns() % 1000), state"),
        "answers differently",
    ),
    "by what it kept": (
        "asked = []\n"
        + rerank_of("asked.append(1)\n    return Choice(value=candidates.value * len(asked)), state"),
        "answers differently",
    ),
    "async": (rerank_of(CHOICE).replace("def mine", "async def mine"), "a policy is one plain function"),
    "several lines": (rerank_of("raise ValueError('one\\ntwo')"), "raised ValueError: one two"),
}

BAD_EVICTIONS = {
    "raises": (evict_of("return state['n']"), "line 10: raised KeyError: 'n'"),
    "bool key": (evict_of("return last_position > 3"), "must be int64 or float64, not bool"),
    "text key": (evict_of("return 'old'"), "must be int64 or float64, not a str"),
    "no key": (evict_of("pass"), "must be int64 or float64, not None"),
    "shape": (evict_of("return last_position[:2]"), r"has shape \(2,\)"),
    "branches": (
        evict_of("return last_position if last_position[0] > 2 else -last_position"),
        "branches on a value",
    ),
    "arity": ("@eviction()\ndef mine(xp, state):\n    return 0\n", "xp, state, last_position, batch, knobs"),
    "touch's arity": (evict_of("return batch", "touch=lambda xp: {}"), "touch must be a function that takes"),
    "touch's state": (
        evict_of("return batch", COUNTING).replace('return {"n"', 'return {"m"'),
        r"what touch returns must be a dict of what it declared \(n\), not a dict of m",
    ),
    "touch returns nothing": (
        evict_of("return batch", COUNTING).replace("return {", "{"),
        "declared .* not None",
    ),
    "numpy": (evict_of("return np.sqrt(last_position + 1.0)"), "calls NumPy itself"),
    "no parentheses": (evict_of("return batch").replace("@eviction()", "@eviction"), "TypeError"),
    "by chance": (evict_of("return last_position * np.random.rand()"), "answers differently"),
    "touch by chance": (
        evict_of("return state['n']", 'touch=touch, state={"n": 0.0}').replace(
            "access.first}", "np.random.rand()}"
        ),
        "answers differently",
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
        ('{"a": training.count}', "line 8: raised AttributeError"),
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
    body = "return Choice(value=candidates.learned.a), state"
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
    "width": "return Choice(k=row.k // 2), state",
    "rerank": "return Choice(value=-candidates.rank, tier=candidates.resident), {'n': state['n'] + 1}",
    "swap": "return Choice(replace=~candidates.resident, value=-candidates.mass), state",
    "drop": "return Choice(drop=~candidates.resident), state",
}
GOOD_DECLARED = {
    "width": '"width"',
    "rerank": '"rerank", needs={"rank"}, state={"n": 0}',
    "swap": '"swap", needs={"mass"}',
    "drop": '"drop"',
}


@pytest.mark.parametrize("stage", GOOD)
def test_a_good_one_of_every_stage(stage, tmp_path, capsys):
    path, evict = tmp_path / f"my_{stage}.py", tmp_path / "my_evict.py"
    path.write_text(HEAD + rerank_of(GOOD[stage], GOOD_DECLARED[stage]))
    evict.write_text(HEAD + evict_of('return state["n"]', COUNTING))
    words = ["--budget", "25%", "--route", str(path), "--evict", str(evict), "--json"]
    assert main(["replay", str(TRACE), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["route"] == f"mine@my_{stage}.py"
    assert (found["margin"], found["drop"]) == (None, None)
    assert found["top_k"] == (4 if stage == "width" else 8)
    done = {"width": "slots", "rerank": "substituted", "swap": "substituted", "drop": "dropped"}[stage]
    assert found["decode"][done] > 0


def test_the_same_name_is_not_the_same_program(tmp_path):
    """Two files that define `mine`, and a copy of a builtin, are groups and numbers of their own."""
    for name, body in (("one", "candidates.value"), ("two", "-candidates.value")):
        (tmp_path / f"{name}.py").write_text(HEAD + rerank_of(f"return Choice(value={body}), state"))
    trace = generate(HEADER, seed=3).write(tmp_path / "t")
    cells = build_cells(budgets=["40%"], routes=[str(tmp_path / "one.py"), str(tmp_path / "two.py")])
    assert [len(g.indices) for g in Replayer(trace, cells).groups] == [1, 1]
    one, two = sweep(trace, cells)
    assert one.decode.substituted == 0 < (two.decode.substituted or 0)


def test_policies_that_share_a_key_but_not_a_touch_are_apart(tmp_path, monkeypatch):
    import simlab.policy

    def key(xp, state, last_position, batch, knobs):
        return state["n"]

    def up(xp, state, access, knobs):
        return {"n": state["n"] + access.first}

    def down(xp, state, access, knobs):
        return {"n": state["n"] - access.first}

    known = simlab.policy.builtin_policies()
    policies = {n: eviction(touch=t, state={"n": 0})(key) for n, t in (("up", up), ("down", down))}
    monkeypatch.setattr(simlab.policy, "builtin_policies", lambda: {**known, **policies})
    trace = generate(HEADER, seed=4).write(tmp_path / "t")
    cells = build_cells(budgets=["40%"], evicts=["up", "down"])
    assert len(cells) == 2
    least, most = Replayer(trace, cells).groups
    assert least.shape.key != most.shape.key


# -- live ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "budget"),
    [
        ("0", "40%"),
        ("xp.float64(1.5)", "4/layer"),
        ("xp.where(last_position % 2 == 0, -xp.inf, 1.0)", "40%"),
    ],
)
def test_any_key_evicts_the_same_live_as_in_a_replay(key, budget, tmp_path):
    """A constant key leaves the choice to recency; -inf goes first."""
    path = tmp_path / "key.py"
    path.write_text(HEAD + evict_of(f"return {key}"))
    trace = generate(HEADER, seed=5, n_decode=60).write(tmp_path / "t")
    cell = build_cells(budgets=[budget], evicts=[str(path)])[0]
    found = replay_slots(trace, cell)
    policy = find_eviction(str(path))
    layers = HEADER.moe_layers
    sizes = np.array([HEADER.entry_bytes[i] for i in layers])
    resolved = resolve_budget(parse_budget(budget), "global", HEADER, HEADER.n_expert_used)
    live = LiveCache(sizes, HEADER.n_expert, resolved, policy, knob_values({}, {}))
    evictions = misses = 0
    for _, batch in found.slots.group_by("graph", "layer", maintain_order=True):
        walk = batch["expert"].to_numpy().reshape(-1, HEADER.n_expert_used).astype(np.int32)
        outcome = live.run_batch(layers.index(batch["layer"][0]), walk, None, np.ones(walk.shape, np.float32))
        evictions, misses = evictions + len(outcome.evicted), misses + len(outcome.misses)
    assert evictions == found.numbers.all.evictions > 0
    assert misses == found.numbers.all.misses


def live_route(path: Path) -> LiveRoute:
    return LiveRoute(parse_route(str(path)), 3, 10, 2, "raw", WeightRule())


def test_what_a_policy_raises_live_names_it(tmp_path):
    """Even where the dry run, of four candidates, could not know."""
    path = tmp_path / "late.py"
    body = "lost = {}[9] if len(candidates.expert) > 4 else 0\n    "
    path.write_text(HEAD + rerank_of(body + CHOICE))
    route = live_route(path)
    scores, router = np.zeros((1, 10), np.float32), np.arange(3, dtype=np.int32)[None]
    with pytest.raises(InputError, match=r"policy mine@late.py, line 7: raised KeyError"):
        route.rerank(0, scores, router, np.zeros(10, bool))


def test_a_wrong_policy_opens_no_live_route_and_no_cache():
    """Policies made in code, which no file check has seen."""

    @routing("drop")
    def floating(xp, candidates, row, state, knobs):
        return Choice(drop=candidates.weight), state

    @eviction()
    def boolean(xp, state, last_position, batch, knobs):
        return last_position > 0

    with pytest.raises(InputError, match=r"floating@test_user_policies.py: .* must be bool"):
        check_policy(floating)
    budget = resolve_budget(parse_budget(f"{1000 / MIB}MiB"), "global", HEADER, 3)
    with pytest.raises(InputError, match=r"boolean@test_user_policies.py: .* int64 or float64"):
        LiveCache(np.array([7, 7]), 10, budget, boolean, knob_values({}, {}))


def test_a_recording_of_a_wrong_policy_writes_nothing(tmp_path, capsys):
    pytest.importorskip("llama_cpp")
    path, out = tmp_path / "my_recorded.py", tmp_path / "out.trace"
    path.write_text(HEAD + rerank_of("return Choice(), state"))
    words = ["record", "--out", str(out), "--prompt", "x", "-n", "4", "--budget", "25%"]
    assert main([*words, "--route", str(path)]) == 2
    out_text, err = capsys.readouterr()
    assert out_text == ""
    assert err.startswith("simlab: error: policy mine@my_recorded.py: Choice(value=...) must be numbers")
    assert not out.exists()


def test_declarations_made_in_code_are_checked_too():
    with pytest.raises(InputError, match="policy wrong: knob a must be a Knob"):

        @routing("rerank", knobs={"a": 1})  # pyright: ignore
        def wrong(xp, candidates, row, state, knobs):
            return Choice(value=candidates.value), state

    with pytest.raises(InputError, match="a policy is one plain function"):
        routing("rerank", knobs={"a": Knob(0, 0, 1)})(print)  # pyright: ignore


def test_tiers_values_and_state_of_any_number_type_live(tmp_path):
    """What the dry run lets through, the live driver takes: bool tiers, int values, Python numbers as state."""
    path = tmp_path / "loose.py"
    path.write_text(HEAD + rerank_of(GOOD["rerank"].replace("state['n'] + 1", "1"), GOOD_DECLARED["rerank"]))
    route = live_route(path)
    scores = np.arange(10, 0, -1, dtype=np.float32)[None]
    resident = np.zeros(10, bool)
    resident[[1, 7]] = True
    found = route.rerank(0, scores, np.arange(3, dtype=np.int32)[None], resident)
    assert found.experts.tolist() == [[1, 7, 0]]
    assert route.rerank(0, scores, np.arange(3, dtype=np.int32)[None], resident).substituted == 1


HALF = HEAD + (
    '@routing("width", knobs={"extra": Knob(0, 0, 99, integer=True)})\n'
    "def half(xp, candidates, row, state, knobs):\n    return Choice(k=row.k // 2 + knobs.extra), state\n"
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
    Path("once_kept.py").write_text(HEAD + evict_of("return state['n']", COUNTING))
    for option, file in (("--route", "once_recorded.py"), ("--evict", "once_kept.py")):
        assert main(["record", "--out", "t.trace", "--force", *half, option, file]) == 0
        capsys.readouterr()
        assert main(["replay", "t.trace"]) == 2
        error = capsys.readouterr().err
        assert f"was recorded under a policy file, {file}, which it does not carry" in error
        assert f"give that file with {option}" in error
        assert main(["replay", "t.trace", option, file]) == 0
        capsys.readouterr()
