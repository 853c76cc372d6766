"""Budgets, routes and lists of cells, from words."""

from __future__ import annotations

import math
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simlab.cells import MIB, build_cells, effective_k, parse_budget, parse_route, resolve_budget
from simlab.errors import InputError
from simlab.types import TraceHeader

HEADER = TraceHeader(
    model="m", arch="a", n_layer=4, n_expert=16, n_expert_used=4, gating=None, score_space=None,
    weight_rule=None, entry_bytes={0: 1000, 1: 3000, 3: 2000},
)  # fmt: skip
CYCLE = 4 * 6000


def total(text: str, k: int = 4) -> int:
    return resolve_budget(parse_budget(text), "global", HEADER, k).total_bytes


# ---------------------------------------------------------------------------------------------------------
# Budgets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2MiB", 2 * MIB),
        ("0.5mib", MIB // 2),
        (".5MiB", MIB // 2),
        ("1GiB", 1024 * MIB),
        ("1e-3MiB", 1048),
        ("1cycle", CYCLE),
        ("2.5cycles", 60_000),
        ("25%", 24_000),
        ("100%", 96_000),
        ("3/layer", 18_000),
        (" 2MiB ", 2 * MIB),
    ],
)
def test_budgets_in_bytes(text: str, expected: int) -> None:
    assert total(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "2000", "MiB", "2000 MB", "-1MiB", "0MiB", "0cycles", "0/layer", "0%", "nanMiB", "infMiB",
     "1e999MiB", "1.5/layer", "101%", "2MiB,3MiB", "two cycles", "1e9MiB", "OFFF", "0x10MiB", "1__0MiB"],
)  # fmt: skip
def test_budgets_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_budget(text)
    assert str(caught.value).startswith("--budget ")
    assert "\n" not in str(caught.value)


def test_off_has_no_bytes() -> None:
    resolved = resolve_budget(parse_budget("off"), "global", HEADER, 4)
    assert resolved.off
    assert resolved.total_bytes == 0


def test_cycles_follow_k() -> None:
    assert total("1cycles", k=2) == CYCLE // 2
    assert effective_k(parse_route("top_k:k=2"), HEADER) == 2
    assert effective_k(parse_route("original"), HEADER) == 4


def test_scope_per_layer_splits_bytes_evenly_and_per_layer_budgets_by_entry() -> None:
    split = resolve_budget(parse_budget("1MiB"), "per_layer", HEADER, 4)
    assert split.per_layer
    assert split.layer_bytes == (MIB // 3,) * 3
    for scope in ("global", "per_layer"):
        own = resolve_budget(parse_budget("3/layer"), scope, HEADER, 4)
        assert own.per_layer
        assert own.layer_bytes == (3000, 9000, 6000)


def test_a_budget_of_less_than_a_byte() -> None:
    with pytest.raises(InputError, match="less than one byte"):
        total("1e-9MiB")


@given(st.decimals(min_value="0.001", max_value="900000", places=3))
def test_any_decimal_of_mib(amount: object) -> None:
    expected = math.floor(Fraction(float(str(amount))) * MIB)
    assert abs(total(f"{amount}MiB") - expected) <= 1


@given(st.integers(1, 10_000))
def test_bytes_survive_the_way_through_text(size: int) -> None:
    """The recorded budget is written as MiB; dividing by a power of two loses nothing."""
    assert total(f"{size / MIB!r}MiB") == size


@given(st.text(max_size=12))
def test_any_text_parses_or_is_one_clear_line(text: str) -> None:
    message, budget = "", None
    try:
        budget = parse_budget(text)
    except InputError as error:
        message = str(error)
    assert message.startswith("--budget") if budget is None else budget.kind == "off" or budget.amount > 0


@given(st.floats(0.001, 1000), st.sampled_from(["MiB", "GiB", "cycles", "%", "/layer"]))
def test_more_is_never_less(amount: float, unit: str) -> None:
    try:
        small, large = total(f"{amount!r}{unit}"), total(f"{2 * amount!r}{unit}")
    except InputError:
        return
    assert small <= large <= 2 * small + 1


# ---------------------------------------------------------------------------------------------------------
# Routes


def test_a_route_in_stage_order_with_defaults() -> None:
    route = parse_route("drop_cold:F=.5,renorm=0+substitute:L=.15+top_k:k=3")
    assert route.name == "top_k+substitute+drop_cold"
    assert route.knobs == {"k": 3, "L": 0.15, "F": 0.5, "renorm": 0, "prefill": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no such routing policy"),
        ("lru", "no such routing policy"),
        ("", "'': names no policy"),
        ("substitute:L=.1+", "part 2 of 2 names no policy"),
        ("+substitute", "part 1 of 2 names no policy"),
        (":L=.1", "':L=.1': names no policy"),
        ("mine@my.py", "no such routing policy; give the file my.py"),
        ("substitute:L=2", "between 0 and 1"),
        ("substitute:L=nan", "between 0 and 1"),
        ("substitute:M=1", "has no knob 'M'; it has L"),
        ("substitute:L", "'L' is not knob=value"),
        ("substitute:L=x", "'x' is not a number"),
        ("substitute:L=.1,L=.2", "'L' is given twice"),
        ("substitute+original", "two rerank policies"),
        ("top_k:k=2.5", "whole number"),
        ("top_k:k=0", "between 1 and 512"),
        ("missing.py", "no such file"),
    ],
)
def test_routes_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_route(text)
    assert str(caught.value).startswith("--route")


POLICY = '''
from simlab.policy import routing
from simlab.types import Knob, Rerank

@routing("rerank", knobs={"a": Knob(0.5, 0, 1)}, needs={"scores"})
def mine(candidate, row, state, knobs):
    """Mine."""
    return Rerank(candidate.value * knobs.a, 0, True)
'''


def test_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "of_a_file.py"
    path.write_text(POLICY)
    route = parse_route(f"{path}:a=.25+drop_cold")
    assert route.name == "mine@of_a_file.py+drop_cold"
    assert route.knobs["a"] == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit()", "SystemExit"),
        ("x = 1", "holds no policy"),
        ("import nothing_there", "ModuleNotFoundError"),
        ("def", "SyntaxError"),
    ],
)
def test_policy_files_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / f"policy_{abs(hash(text))}.py"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        parse_route(str(path))


# ---------------------------------------------------------------------------------------------------------
# Cells


def test_the_same_code_is_one_cell_and_the_same_name_is_not(tmp_path: Path) -> None:
    """Policies called the same are told apart, in cells and in names; builtins among them."""
    routes = [f"{tmp_path / place}" for place in ("a.py", "b.py", "c/a.py", "c/../a.py")]
    (tmp_path / "c").mkdir()
    for route in routes[:3]:
        Path(route).write_text(POLICY)
    shutil.copy(Path(__file__).parent.parent / "policies" / "substitute.py", tmp_path / "substitute.py")
    cells = build_cells(
        budgets=["1MiB"], routes=[*routes, f"{tmp_path}/substitute.py:L=.1", "substitute:L=.1"]
    )
    assert len(cells) == 5
    names = [c.route.name for c in cells]
    assert len(set(names)) == 5
    assert names[3:] == ["substitute@substitute.py", "substitute"]
    assert [c.margin for c in cells] == [None] * 4 + [0.1]


def test_an_edited_file_is_another_policy(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text(POLICY)
    first = parse_route(str(path)).steps[0].policy
    path.write_text(POLICY.replace("0.5", "0.25"))
    second = parse_route(str(path)).steps[0].policy
    assert (first.knobs["a"].default, second.knobs["a"].default) == (0.5, 0.25)
    assert first.source_hash != second.source_hash
    path.write_text(POLICY)
    assert parse_route(str(path)).steps[0].policy is first


@pytest.mark.parametrize("name", ["original", "substitute"])
def test_a_users_policy_called_like_a_builtin_is_not_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}_too.py"
    path.write_text(POLICY.replace("mine", name))
    assert build_cells(budgets=["1MiB"], routes=[str(path)])[0].margin is None
    with pytest.raises(InputError, match=f"{name}_too.py: substitute decides the rerank too"):
        build_cells(budgets=["1MiB"], routes=[str(path)], margins=[".1"])
    with pytest.raises(InputError, match=f"--budget off: {name}@{name}_too.py needs a cache"):
        build_cells(budgets=["off"], routes=[str(path)])


def test_the_k_of_a_width_policy_is_what_its_function_says(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text(
        """
from simlab.policy import routing
from simlab.types import Knob

@routing("width", knobs={"less": Knob(2, 0, 99, integer=True)})
def half(k, knobs):
    return k - knobs.less
"""
    )
    assert effective_k(parse_route(str(path)), HEADER) == 2
    assert effective_k(parse_route(f"{path}:less=1"), HEADER) == 3
    with pytest.raises(InputError, match=r"--route .*half.py:less=4: must lie between 1 and .* 16 experts"):
        effective_k(parse_route(f"{path}:less=4"), HEADER)


@pytest.mark.parametrize(
    ("options", "start"),
    [({"routes": ["top_k:k=17"]}, "--route top_k:k=17: "), ({"top_ks": ["17"]}, "--top-k 17: ")],
)
def test_a_k_too_large_names_what_asked_for_it(options: dict[str, list[str]], start: str) -> None:
    with pytest.raises(InputError, match="must lie between 1 and this model's 16 experts") as caught:
        effective_k(build_cells(budgets=["1MiB"], **options)[0].route, HEADER)  # pyright: ignore
    assert str(caught.value).startswith(start)


def test_lists_multiply_budgets_outermost() -> None:
    cells = build_cells(budgets=["1MiB", "2MiB"], margins=["0", ".1"], drops=[".5", "1"])
    assert len(cells) == 8
    assert [c.budget.text for c in cells] == ["1MiB"] * 4 + ["2MiB"] * 4
    assert {(c.margin, c.drop) for c in cells} == {(0, 0.5), (0, 1), (0.1, 0.5), (0.1, 1)}
    assert {c.route.name for c in cells} == {"substitute+drop_cold"}


def test_a_margin_takes_the_place_of_original() -> None:
    cells = build_cells(budgets=["1MiB"], routes=["original"], margins=[".1"])
    assert [c.route.name for c in cells] == ["substitute"]


def test_no_policy_is_original_and_equal_cells_are_one() -> None:
    cells = build_cells(budgets=["1MiB", "1MiB"], routes=["original", "original"])
    assert [c.route.name for c in cells] == ["original"]
    assert (cells[0].margin, cells[0].drop) == (None, None)


def test_two_ways_to_say_one_stage_are_refused() -> None:
    with pytest.raises(InputError, match="decides the rerank too"):
        build_cells(budgets=["1MiB"], routes=["substitute"], margins=[".1"])


def test_a_cache_that_is_off_has_nothing_to_prefer() -> None:
    assert build_cells(budgets=["off"])[0].budget.kind == "off"
    assert build_cells(budgets=["off"], top_ks=["2"])
    for margins, drops, routes in (([".1"], [], []), ([], [".5"], []), ([], [], ["substitute"])):
        with pytest.raises(InputError, match="--budget off"):
            build_cells(budgets=["off"], margins=margins, drops=drops, routes=routes)


@pytest.mark.parametrize("value", ["nan", "-0.1", "1.5", "inf"])
def test_values_out_of_range_name_the_option_and_the_range(value: str) -> None:
    with pytest.raises(InputError, match=f"--margin {value}: .* must lie between 0 and 1"):
        build_cells(budgets=["1MiB"], margins=[value])
    with pytest.raises(InputError, match=f"--drop {value}: .* must lie between 0 and 1"):
        build_cells(budgets=["1MiB"], drops=[value])


def test_an_eviction_policy_must_be_one() -> None:
    with pytest.raises(InputError, match="--evict substitute: no such eviction policy"):
        build_cells(budgets=["1MiB"], evicts=["substitute"])
