"""Files with random damage are read or refused in one line; what the damage found by hand and by chance was.

`SIMLAB_FUZZ_EXAMPLES=20000 pytest tests/test_hostile_files.py` searches for longer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fuzz_damage import damaged as damaged_files
from fuzz_damage import kinds, originals
from fuzz_readers import check as check_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from route_files import HEADING, io_lines, metrics_lines, route_lines

from simlab.errors import InputError, SimlabWarning
from simlab.replay.columns import TraceColumns
from simlab.trace import route_csv
from simlab.trace.importer import import_files
from simlab.trace.info import info_lines, trace_info
from simlab.trace.store import open_trace
from simlab.types import TraceHeader

Damage = list[tuple[float, int, bytes]]
"""Where in the file (a share of its length), how many bytes go, and what comes in their place."""

EXAMPLES = int(os.environ.get("SIMLAB_FUZZ_EXAMPLES", "150"))
PIECES = [
    b"\r", b"\n", b"\r\n", b"\0", b'"', b",", b"#", b"# ", b"=", b" ", b"-", b".", b"+", b"/", b"\\", b"\xff",
    b"-1", b"0", b"1", b"7", b"1.5", b"-0.5", b"1e400", b"1e39", b"nan", b"inf", b"-inf", b"\xc2\xb2", b"\xef\xbb\xbf",
    b"2147483648", b"-2147483649", b"9223372036854775807", b"9223372036854775808", b"99999999999999999999",
    b"n_expert=99999999999999999", b"turn", b"expert", b"layer=", b"null", b"true", b"{}", b"[]", b"[[", b'"x"',
    b"e9", b"_", b"\xf0\x9f\x92\xa9", b"\\ud800", b"NaN", b"Infinity", b"version https://git-lfs",
]  # fmt: skip


def damages() -> st.SearchStrategy[Damage]:
    piece = st.one_of(st.sampled_from(PIECES), st.binary(max_size=3))
    edit = st.tuples(st.floats(0, 1), st.sampled_from([0, 0, 1, 1, 2, 5, 40]), piece)
    return st.lists(edit, min_size=1, max_size=4)


def damaged(data: bytes, damage: Damage) -> bytes:
    for share, gone, piece in damage:
        place = int(share * len(data))
        data = data[:place] + piece + data[place + gone :]
    return data


def read_or_refused(read: Callable[[], object]) -> str | None:
    """The refusal, None where the file was read; any other exception fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimlabWarning)
        try:
            read()
        except InputError as error:
            return str(error)
    return None


def imported(folder: Path, *files: Path) -> None:
    """Import, open and get ready for a replay; a refused import leaves nothing."""
    out = folder / "t.trace"
    try:
        import_files([str(file) for file in files], str(out), force=True)
    except InputError:
        assert not out.exists()
        raise
    TraceColumns(open_trace(out))
    list(info_lines(trace_info(out)))
    for path in sorted(out.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    out.rmdir()


@cache
def original(kind: str) -> bytes:
    lines = {"route": route_lines(), "metrics": metrics_lines(), "io": io_lines()}[kind]
    return "".join(line + "\n" for line in lines).encode()


@cache
def original_header() -> bytes:
    """A header with every field filled."""
    by_layer = {"0": 1000, "1": 1000, "2": 1000}
    fields = {
        "model": "toy.gguf", "arch": "toy", "n_layer": 3, "n_expert": 8, "n_expert_used": 2, "gating": "softmax",
        "score_space": "prob",
        "weight_rule": {"softmax_over_selected": False, "normalise": True, "clamp_min": 0.0, "scale": 1.0},
        "entry_bytes": by_layer, "window_bytes": {layer: [4096] * 8 for layer in by_layer}, "dense_bytes": by_layer,
        "budget_bytes": 36000, "budget": "12/layer", "route": "substitute", "knobs": {"L": 0.15}, "evict": "lru",
        "evict_knobs": {"a": 0.5}, "scope": "global", "policy_source_hash": "0", "io_mode": "direct",
        "engine": "simlab", "engine_version": "1", "cpu": "x", "text_hash": "0", "created": "2026-01-01",
        "schema_version": 1, "complete": True, "rows": {"routing": 19, "reads": 0, "tokens": 5}, "routing_width": 2,
    }  # fmt: skip
    return json.dumps(fields, indent=1).encode()


FUZZ = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("kind", ["route", "metrics", "io"])
@given(damage=damages())
@FUZZ
def test_a_damaged_file_is_read_or_refused(kind: str, tmp_path: Path, damage: Damage) -> None:
    files = [tmp_path / f"{name}.csv" for name in dict.fromkeys(("route", kind))]
    for file in files:
        data = original(file.stem)
        file.write_bytes(damaged(data, damage) if file.stem == kind else data)
    refusal = read_or_refused(lambda: imported(tmp_path, *files))
    assert refusal is None or (str(tmp_path) in refusal and "\n" not in refusal)


@given(damage=damages())
@FUZZ
def test_a_damaged_header_is_read_or_refused(tmp_path: Path, damage: Damage) -> None:
    folder = tmp_path / "t.trace"
    if not folder.exists():
        (tmp_path / "route.csv").write_bytes(original("route"))
        import_files([str(tmp_path / "route.csv")], str(folder))
    (folder / "header.json").write_bytes(damaged(original_header(), damage))
    refusal = read_or_refused(lambda: list(info_lines(trace_info(folder))))
    assert refusal is None or (str(folder) in refusal and "\n" not in refusal)


@pytest.mark.parametrize("kind", kinds())
@given(seed=st.integers(0, 2**32))
@settings(FUZZ, max_examples=max(EXAMPLES // 6, 1))
def test_every_format_damaged_in_structure_is_read_or_refused(kind: str, tmp_path: Path, seed: int) -> None:
    """The damage of `fuzz_readers.py`; `python tests/fuzz_readers.py` searches a million times longer."""
    files, facts = damaged_files(kind, random.Random(seed))
    assert check_files(tmp_path, files, facts, 0 if seed % 5 == 0 else 4) in ("read", "refused")


@pytest.mark.parametrize("kind", kinds())
def test_every_format_undamaged_is_read(kind: str, tmp_path: Path) -> None:
    files, facts = originals()[kind]
    assert check_files(tmp_path, files, facts, 0) == "read"


def test_the_undamaged_files_are_read(tmp_path: Path) -> None:
    for kind in ("route", "metrics", "io"):
        (tmp_path / f"{kind}.csv").write_bytes(original(kind))
    imported(tmp_path, *(tmp_path / f"{kind}.csv" for kind in ("route", "metrics", "io")))
    import_files([str(tmp_path / "route.csv")], str(tmp_path / "t.trace"))
    (tmp_path / "t.trace/header.json").write_bytes(original_header())
    assert open_trace(tmp_path / "t.trace").header.knobs == {"L": 0.15}


# ---------------------------------------------------------------------------------------------------------
# Every value of every number


HOSTILE = [
    "²", "x", "nan", "inf", "-inf", "1e400", "1e300", "0.5", "-1", "-2", "2147483648", "65536", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "99999999999999999999", "9" * 5000, "1\r2", '"', "", " ", "1_0",
]  # fmt: skip
LARGE = {"65536", "2147483648"}
TIME = LARGE | {"nan", "-1", "-2", "0.5"}
SIZE_MIB = LARGE | {"-1", "0.5"}
LEGAL = {
    # nan: no weight node; -1, nan: a time that was not measured, a cache that was off, no position.
    "weight": {"nan", "0.5", *LARGE, "9223372036854775807", "9223372036854775808", "99999999999999999999"},
    "io_ms": TIME, "wall_ms": TIME, "majflt": LARGE | {"-1"}, "read_bytes": {"65536"},
    "cache_budget_mib": SIZE_MIB, "cache_mb": SIZE_MIB, "cache_budget_MiB": SIZE_MIB, "drop_cold_frac": {"0.5"},
    "offset": LARGE, "latency_ns": LARGE, "lane": {"65536"}, "proj": {"65536"}, "overlap": {"65536"},
    "dense_bytes": LARGE, "n_prompt": {"65536"},
}  # fmt: skip
"""Which of them a field may have; all others must be refused with the field's name and its line."""
IN_COLUMNS = [
    *(("route", f) for f in ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency")),
    *(("route", f) for f in ("expert_bytes", "dropped")),
    *(("metrics", f) for f in ("wall_ms", "io_ms", "read_bytes", "majflt", "cache_budget_mib")),
    *(("io", f) for f in ("turn", "phase", "layer", "expert", "lane", "proj", "offset", "latency_ns")),
]
IN_WORDS = [
    *(("route", f) for f in ("n_layer", "n_expert", "n_expert_used", "layer", "expert_bytes", "dense_bytes")),
    *(("metrics", f) for f in ("n_expert", "cache_mb", "overlap", "drop_cold_frac", "drop_renorm")),
    *(("metrics", f) for f in ("drop_prefill", "n_prompt", "cache_budget_MiB")),
]


def refusal_of(tmp_path: Path, kind: str, edit: Callable[[list[str]], list[str]]) -> str | None:
    """What importing the route trace and one edited file says."""
    files = [tmp_path / f"{name}.csv" for name in dict.fromkeys(("route", kind))]
    for file in files:
        lines = original(file.stem).decode().splitlines()
        text = "".join(line + "\n" for line in (edit(lines) if file.stem == kind else lines))
        file.write_bytes(text.encode(errors="surrogateescape"))
    return read_or_refused(lambda: imported(tmp_path, *files))


@pytest.mark.parametrize(("kind", "field"), IN_COLUMNS)
def test_hostile_values_in_columns(kind: str, field: str, tmp_path: Path) -> None:
    lines = original(kind).decode().splitlines()
    heading = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    column = lines[heading].split(",").index(field)
    for value in HOSTILE:

        def edit(lines: list[str], value: str = value) -> list[str]:
            fields = lines[heading + 2].split(",")
            fields[column] = value
            return [*lines[: heading + 2], ",".join(fields), *lines[heading + 3 :]]

        refusal = refusal_of(tmp_path, kind, edit)
        if value in LEGAL.get(field, set()):
            assert refusal is None, (value, refusal)
        elif field == "turn" and value == "65536":
            # Legal by itself: a read of no graph is left out, and in a route trace the next line goes back.
            assert refusal is None or f"line {heading + 4}, field 'turn': 0 after 65536" in refusal
        elif field == "step" and value in ("-1", "65536"):
            # Legal by itself, and here it tears a routing in two.
            assert refusal is not None
            assert f"line {heading + 3}, field 'slot': slot 1 begins a routing" in refusal
        else:
            assert refusal is not None, value
            assert f"{kind}.csv, line {heading + 3}, field '" in refusal or value in ('"', "1\r2"), (
                value,
                refusal,
            )
            assert f"field '{field}'" in refusal or f"field {column + 1}" in refusal, (value, refusal)


@pytest.mark.parametrize(("kind", "field"), IN_WORDS)
def test_hostile_values_in_comment_lines(kind: str, field: str, tmp_path: Path) -> None:
    lines = original(kind).decode().splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith("#") and f" {field}=" in line)
    found = next(word for word in lines[number].split() if word.startswith(f"{field}="))
    for value in HOSTILE:
        if not value.strip():
            continue

        def edit(lines: list[str], value: str = value) -> list[str]:
            return [
                line.replace(f" {found}", f" {field}={value}") if i == number else line
                for i, line in enumerate(lines)
            ]

        refusal = refusal_of(tmp_path, kind, edit)
        if value in LEGAL.get(field, set()):
            assert refusal is None or field == "n_prompt", (value, refusal)
        else:
            assert refusal is not None, value
            assert f"{kind}.csv, line " in refusal, (value, refusal)
            # A legal `expert_bytes` that the rows contradict is refused at the first such row.
            assert field in refusal or value == "1\r2", (value, refusal)


# ---------------------------------------------------------------------------------------------------------
# Content that no run can have


def with_fields(line: int, **values: str) -> Callable[[list[str]], list[str]]:
    """Set fields of a data line, 0 the first, of the route trace."""

    def edit(lines: list[str]) -> list[str]:
        heading = lines.index(HEADING)
        names = HEADING.split(",")
        fields = dict(zip(names, lines[heading + 1 + line].split(","), strict=True)) | values
        return [*lines[: heading + 1 + line], ",".join(fields.values()), *lines[heading + 2 + line :]]

    return edit


def with_word(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [
        line.replace(old, new) if line.startswith(("#", "turn", "step")) else line for line in lines
    ]


IMPOSSIBLE: dict[str, tuple[str, Callable[[list[str]], list[str]], str]] = {
    "bytes of no entry": ("route", with_fields(3, expert_bytes="999"), "line 10, field 'expert_bytes': 999"),
    "bytes of padding": (
        "route", with_fields(3, expert="-1", weight="0", expert_bytes="1000"), "line 10, field 'expert'"
    ),
    "a turn below zero": ("route", with_fields(3, turn="-1"), "line 10, field 'turn': -1"),
    "turns that run backwards": ("route", with_fields(3, turn="1"), "line 11, field 'turn': 0 after 1"),
    "a weight below zero": ("route", with_fields(3, weight="-0.25"), "line 10, field 'weight': -0.25"),
    "a weight of no float32": ("route", with_fields(3, weight="1e39"), "line 10, field 'weight': 1e39"),
    "a layer above the model": ("route", with_fields(3, layer="3"), "line 10, field 'layer': 3"),
    "a size for such a layer": ("route", with_word("n_layer=3", "n_layer=2"), "line 5, field 'layer': 2"),
    "two sizes for a layer": ("route", with_word("layer=1 ", "layer=0 "), "line 4, field 'layer': a second"),
    "two model lines": ("route", lambda x: [x[0], x[1], *x[1:]], "line 3, field 'model': a second"),
    "a column twice": ("route", with_word("turn,", "step,"), "line 6, field 3: the column 'step' a second time"),
    "a column twice but for a space": ("metrics", with_word("io_ms,", "io_ms ,io_ms,"), "line 5, field 5"),
    "a column without a name": ("route", with_word(",dropped", ","), "line 6, field 10: a column without"),
    "a drop threshold above 1": ("metrics", with_word("frac=0", "frac=1.5"), "line 4, field 'drop_cold_frac'"),
    "a read of a layer that is not streamed": (
        "io", lambda x: [*x, "0,1,3,7,0,0,0,0,0,1,1,1"], "line 9, field 'layer': 7"
    ),
    "a read of an expert there is not": (
        "io", lambda x: [*x, "0,1,3,1,8,0,0,0,0,1,1,1"], "line 9, field 'expert': 8"
    ),
    "a quote over two lines": ("route", with_fields(3, dropped='"0'), "line 10, field 10: a quote"),
    "a line of carriage returns": ("route", lambda x: ["\r".join(x)], "line 1, field 1: a carriage return"),
    "text in another encoding": ("route", with_fields(3, weight="\udcff"), "line 10, field 7: not UTF-8"),
    "a column with the name of a row number": ("route", with_word(",dropped", ",row"), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_content(case: str, tmp_path: Path) -> None:
    kind, edit, message = IMPOSSIBLE[case]
    refusal = refusal_of(tmp_path, kind, edit)
    if message:
        assert refusal is not None
        assert f"{kind}.csv, line " in refusal
        assert message in refusal
    else:
        assert refusal is None


def test_bytes_that_cannot_be_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_csv, "_MAX_SUM", 10_000)
    refusal = refusal_of(tmp_path, "route", lambda lines: lines)
    assert refusal is not None
    assert "line 7, field 'layer': expert_bytes=1000 is too large to be added up" in refusal


def test_one_slot_number_that_would_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_csv, "_MANY_SLOTS", 1 << 10)

    def edit(lines: list[str]) -> list[str]:
        lines = with_word("n_expert=8 n_expert_used=2", "n_expert=60000 n_expert_used=60000")(lines)
        return with_fields(3, slot="59998")(lines)

    refusal = refusal_of(tmp_path, "route", edit)
    assert refusal is not None
    assert "line 10, field 'slot': 59998" in refusal


def test_a_line_is_counted_past_a_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    lines = with_fields(3, layer="x")(original("route").decode().splitlines())
    text = "\ufeff" + "\n".join([*lines[:6], "", *lines[6:]]) + "\n"
    (tmp_path / "route.csv").write_text(text)
    with pytest.raises(InputError, match="line 11, field 'layer'"):
        import_files([str(tmp_path / "route.csv")], str(tmp_path / "t.trace"))


def test_a_file_cut_inside_its_last_line_end_is_whole(tmp_path: Path) -> None:
    (tmp_path / "route.csv").write_bytes(original("route").replace(b"\n", b"\r\n")[:-1])
    assert open_trace(import_files([str(tmp_path / "route.csv")], str(tmp_path / "t.trace"))).n_rows == 19


# ---------------------------------------------------------------------------------------------------------
# header.json

NESTED = "[" * 100_000
WRONG_HEADERS: list[tuple[str, str, str]] = [
    *(("rows", value, "field 'rows'") for value in ("[1]", "5", '"x"', "true", '{"routing": 1}', '{"routing": "x"}')),
    *(("budget_bytes", value, "field 'budget_bytes'") for value in ('"x"', "[]", "{}", "-1", "1.5", "true", "1e30")),
    *((name, value, f"field '{name}'") for name in ("n_layer", "n_expert", "n_expert_used", "routing_width")
      for value in ("1e300", "0", "-1", "null", '"8"', "true", "2.0", "99999999999999999999", "[]")),
    *(("knobs", value, "field 'knobs'") for value in ('{"L": "a"}', '{"L": null}', '{"L": true}', "[]", "null")),
    ("knobs", '{"L": 1e999}', "field 'knobs': knobs of L is Infinity"),
    ("knobs", '{"L": NaN}', "NaN is not JSON"),
    ("knobs", '{"\\ud800": 1}', "field 'knobs'"),
    ("knobs", '{"L": 1, "L": 2}', "field \"L\" is there twice"),
    *(("entry_bytes", f'{{"0": {value}, "1": 9, "2": 9}}', "field 'entry_bytes': entry_bytes of layer 0 is ")
      for value in ("1e18", "9223372036854775808", "1.7", "0", "-5", "null", '"9"', "[9]")),
    ("entry_bytes", '{"0": 1000, "1": 1000, "2": 1000, "3": 1000}', "field 'entry_bytes': layer 3 of n_layer 3"),
    ("entry_bytes", '{"00": 1000}', "field 'entry_bytes': \"00\" is not a layer number"),
    ("entry_bytes", '{"²": 1000}', "is not a layer number"),
    ("entry_bytes", "[1000]", "field 'entry_bytes'"),
    ("dense_bytes", '{"0": -1}', "field 'dense_bytes'"),
    ("dense_bytes", "[]", "field 'dense_bytes'"),
    ("window_bytes", '{"0": [1, 2]}', "field 'window_bytes': layer 0 has 2"),
    ("window_bytes", '{"0": 5}', "field 'window_bytes'"),
    *((name, value, f"field '{name}'") for name in ("score_space", "gating", "scope", "io_mode")
      for value in ('"foo"', "1", "[]", "{}", "true")),
    *((name, value, f"field '{name}'") for name in ("model", "arch") for value in ("1", "[]", "null", "{}")),
    *((name, value, f"field '{name}'") for name in ("evict", "route", "cpu", "engine", "created", "text_hash")
      for value in ("1", "[]", "{}", "true", '"\\udfff"')),
    ("weight_rule", '{"scale": "x"}', "field 'weight_rule.scale'"),
    ("weight_rule", '{"scale": 0}', "field 'weight_rule.scale'"),
    ("weight_rule", '{"clamp_min": -1}', "field 'weight_rule.clamp_min'"),
    ("weight_rule", '{"normalise": 1}', "field 'weight_rule.normalise'"),
    ("weight_rule", "[]", "field 'weight_rule'"),
    *(("schema_version", value, "field 'schema_version'") for value in ("true", "1.0", '"1"', "null", "2", "[]")),
    ("complete", "1", "field 'complete'"),
    ("future", NESTED + "]" * 100_000, "nested too deeply"),
    ("future", "9" * 5000, "not JSON"),
]  # fmt: skip


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headers")
    (folder / "route.csv").write_bytes(original("route"))
    return import_files([str(folder / "route.csv")], str(folder / "t.trace"))


@pytest.mark.parametrize("case", range(len(WRONG_HEADERS)))
def test_wrong_header_fields(case: int, trace_folder: Path) -> None:
    name, value, message = WRONG_HEADERS[case]
    fields = json.loads(original_header()) | {name: "THIS"}
    (trace_folder / "header.json").write_text(json.dumps(fields).replace('"THIS"', value))
    with pytest.raises(InputError) as caught:
        open_trace(trace_folder)
    assert f"{trace_folder}/header.json: " in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "name",
    ["schema_version", *(f.name for f in dataclasses.fields(TraceHeader) if f.default is f.default_factory)],
)
def test_header_fields_that_must_be_there(name: str, trace_folder: Path) -> None:
    """Found by the search: a comma in the name of 'score_space'."""
    fields = {key: value for key, value in json.loads(original_header()).items() if key != name}
    (trace_folder / "header.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match=f"header.json: field '{name}' is missing"):
        open_trace(trace_folder)


def test_optional_header_fields_may_be_null_or_absent(trace_folder: Path) -> None:
    fields = json.loads(original_header())
    optional = [f.name for f in dataclasses.fields(TraceHeader) if f.default is None] + ["rows"]
    required = ("gating", "score_space", "weight_rule")
    (trace_folder / "header.json").write_text(json.dumps(fields | dict.fromkeys((*optional, *required))))
    with pytest.warns(SimlabWarning, match="did not finish"):
        assert open_trace(trace_folder).header.window_bytes is None
    kept = {name: value for name, value in fields.items() if name not in optional}
    (trace_folder / "header.json").write_text(
        json.dumps(kept | {"rows": fields["rows"], "future": {"x": [1]}})
    )
    assert open_trace(trace_folder).header.scope is None
