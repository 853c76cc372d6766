"""A cell's numbers as JSON, as a flat table and for reading. Names: interface.md, "A cell's numbers"."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simlab.cells import route_spec
from simlab.errors import RunError
from simlab.files import replacing
from simlab.types import Cell, CellNumbers, PhaseNumbers, Provenance, known_fields

if TYPE_CHECKING:
    import polars as pl

PHASES = ("decode", "all")
KNOB_FIELDS = ("knobs", "evict_knobs")
"""Fields of a cell that hold several numbers by name."""
LIVE_FIELDS = (
    "tok_s", "wall_ms_per_token", "read_wait_ms_per_token", "ppl", "nll", "ppl_ratio",
)  # fmt: skip
INTERVALS = "intervals"
"""The field of 95 % intervals, [low, high] by name; in the flat table JSON text, or null where there are none."""
READ_AHEAD = "read_ahead"
"""The field of what look-ahead read, numbers by name, likewise."""
PROVENANCE = "provenance"
"""The field of what the numbers are of, texts by name, likewise."""
JSON_TEXT = (INTERVALS, READ_AHEAD, PROVENANCE)
TABLE_LEGEND = (
    "Columns of the table, decode only: cycles = budget in token cycles; hit % of the expert lookups; MiB/token read;\n"
    "cold = first misses of an expert, capacity = the others; subst. %, dropped % of the routed slots;\n"
    "mass = router probability that this loses; agree = share of the router's own experts that ran;\n"
    "ppl_ratio = perplexity over the first live cell's, token by token;\n"
    "95 % = interval of the column before it, from blocks of decode tokens."
)
_SHOW_AFTER_S = 2.0
_REDRAW_S = 0.25
_LINE_S = 20.0


def json_value(value: Any) -> Any:
    """`value` with every float that JSON cannot write as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(v) for v in value]
    return value


def print_json(value: Any) -> None:
    """Write one JSON value to stdout."""
    print(json.dumps(json_value(value), indent=1, allow_nan=False))


def cell_to_json(numbers: CellNumbers) -> dict[str, Any]:
    """One cell as the JSON contract has it; live fields only where they exist."""
    cell = numbers.cell
    fields = {
        "source": numbers.source,
        "route": cell.route.known_name,
        "knobs": dict(cell.route.knobs),
        "margin": cell.margin,
        "drop": cell.drop,
        "top_k": numbers.top_k,
        "evict": cell.evict,
        "evict_knobs": dict(cell.evict_knobs),
        "scope": cell.scope,
        "sequential": cell.sequential,
        "prefetch": cell.prefetch,
        "budget": cell.budget.text,
        "budget_mib": numbers.budget_mib,
        "budget_cycles": numbers.budget_cycles,
        "decode": dataclasses.asdict(numbers.decode),
        "all": dataclasses.asdict(numbers.all),
    }
    rest = {name: getattr(numbers, name) for name in (*LIVE_FIELDS, "note")}
    rest[INTERVALS] = dict(numbers.intervals) or None
    rest[READ_AHEAD] = None if numbers.read_ahead is None else dict(numbers.read_ahead)
    rest[PROVENANCE] = None if numbers.provenance is None else known_fields(numbers.provenance)
    return json_value(fields | {name: value for name, value in rest.items() if value is not None})


def cells_schema() -> dict[str, Any]:
    """Columns of the flat table of cells, with their polars types."""
    import polars as pl

    def of(annotation: str) -> Any:
        return pl.Int64 if annotation.startswith("int") else pl.Float64

    schema: dict[str, Any] = {
        "source": pl.String, "route": pl.String, "knobs": pl.String, "margin": pl.Float64, "drop": pl.Float64,
        "top_k": pl.Int64, "evict": pl.String, "evict_knobs": pl.String, "scope": pl.String,
        "sequential": pl.Boolean, "prefetch": pl.String, "budget": pl.String, "budget_mib": pl.Float64,
        "budget_cycles": pl.Float64,
    }  # fmt: skip
    for phase in PHASES:
        schema |= {f"{phase}_{f.name}": of(str(f.type)) for f in dataclasses.fields(PhaseNumbers)}
    return schema | dict.fromkeys(LIVE_FIELDS, pl.Float64) | dict.fromkeys(("note", *JSON_TEXT), pl.String)


def json_to_row(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as `cell_to_json` has it, flat: phases by prefix, numbers by name as JSON text."""
    row = {name: value for name, value in cell.items() if name not in PHASES}
    for phase in PHASES:
        row |= {f"{phase}_{name}": value for name, value in cell[phase].items()}
    return row | {
        name: json.dumps(row[name]) for name in (*KNOB_FIELDS, *JSON_TEXT) if row.get(name) is not None
    }


def cells_to_frame(cells: Sequence[CellNumbers]) -> pl.DataFrame:
    """Cells as a flat table, one row each, with prefixes `decode_` and `all_`; knobs and intervals are JSON text."""
    import polars as pl

    schema = cells_schema()
    flat = [json_to_row(cell_to_json(numbers)) for numbers in cells]
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in flat], schema=schema)


def cells_from_frame(frame: pl.DataFrame, cells: Sequence[Cell]) -> list[CellNumbers]:
    """The numbers that `cells_to_frame` made a table of, given the cells in its order."""

    def phase(row: dict[str, Any], name: str) -> PhaseNumbers:
        return PhaseNumbers(**{f.name: row[f"{name}_{f.name}"] for f in dataclasses.fields(PhaseNumbers)})

    alike = ("source", "budget_mib", "budget_cycles", "top_k", *LIVE_FIELDS, "note")
    return [
        CellNumbers(
            cell=dataclasses.replace(
                cell,
                route=dataclasses.replace(cell.route, router_known=row["decode_substituted"] is not None),
            ),
            decode=phase(row, "decode"),
            all=phase(row, "all"),
            read_ahead=json.loads(row[READ_AHEAD]) if row[READ_AHEAD] else None,
            provenance=Provenance(**json.loads(row[PROVENANCE])) if row[PROVENANCE] else None,
            intervals={name: (low, high) for name, (low, high) in json.loads(row[INTERVALS] or "{}").items()},
            **{name: row[name] for name in alike},
        )
        for cell, row in zip(cells, frame.iter_rows(named=True), strict=True)
    ]


def _ahead_words(numbers: CellNumbers) -> str | None:
    ahead, prefetch = numbers.read_ahead, numbers.cell.prefetch
    if ahead is None:
        return prefetch and f"prefetch {prefetch}"
    return (
        f"read ahead ({prefetch or 'as recorded'}): {ahead['issued']:,} entries, {ahead['read_mib']:.1f} MiB beside "
        f"the misses; {ahead['useful']:,} used, {ahead['wasted_mib']:.1f} MiB wasted"
    )


class _Estimate(NamedTuple):
    """A column of the table that may have an interval beside it."""

    head: str
    name: str
    """Of its interval."""
    form: str
    scale: float
    value: Callable[[CellNumbers], float | None]


def _share(part: int | None, whole: int) -> float | None:
    return part / whole if whole and part is not None else None


_READS = (
    _Estimate("hit %", "hit_rate", ".1f", 100, lambda c: c.decode.hit_rate),
    _Estimate("MiB/token", "read_mib_per_token", ".2f", 1, lambda c: c.decode.read_mib_per_token),
)
_CHANGES = (
    _Estimate("subst. %", "substituted", ".1f", 100, lambda c: _share(c.decode.substituted, c.decode.slots)),
    _Estimate("dropped %", "dropped", ".1f", 100, lambda c: _share(c.decode.dropped, c.decode.slots)),
    _Estimate("mass", "mass_displaced", ".4f", 1, lambda c: c.decode.mass_displaced),
    _Estimate("agree", "agreement", ".3f", 1, lambda c: c.decode.agreement),
)
_MEASURED = (
    _Estimate("tok_s", "tok_s", ".3f", 1, lambda c: c.tok_s),
    _Estimate("ppl", "ppl", ".3f", 1, lambda c: c.ppl),
    _Estimate("ppl_ratio", "ppl_ratio", ".3f", 1, lambda c: c.ppl_ratio),
)


def table(cells: Sequence[CellNumbers]) -> str:
    """Cells for reading: the decode numbers, one line each, simulated ones marked as such; on a terminal, a legend.

    Intervals stand beside what they are of, but for columns in which none has a width.
    """

    def number(value: float | None, form: str) -> str:
        return "-" if value is None or not math.isfinite(value) else format(value, form)

    def words(estimate: _Estimate) -> list[list[str]]:
        values = [estimate.value(c) for c in cells]
        columns = [[estimate.head, *(number(v and estimate.scale * v, estimate.form) for v in values)]]
        known = [c.intervals.get(estimate.name) for c in cells]
        if any(ends is not None and ends[0] < ends[1] for ends in known):
            spans = [ends and [format(estimate.scale * end, estimate.form) for end in ends] for ends in known]
            columns.append(["95 %", *(" to ".join(ends) if ends else "-" for ends in spans)])
        return columns

    settings = [
        ["source", *("replay (simulated)" if c.source == "replay" else c.source for c in cells)],
        ["route", *(route_spec(c.cell.route) for c in cells)],
        ["evict", *(c.cell.evict_spec for c in cells)],
        ["scope", *(c.cell.scope for c in cells)],
        ["budget MiB", *("off" if c.cell.budget.kind == "off" else f"{c.budget_mib:.1f}" for c in cells)],
        ["cycles", *(number(c.budget_cycles, ".2f") for c in cells)],
        ["k", *(str(c.top_k) for c in cells)],
    ]
    misses = [
        ["cold", *(str(c.decode.cold_misses) for c in cells)],
        ["capacity", *(str(c.decode.capacity_misses) for c in cells)],
    ]
    measured = [e for e in _MEASURED if any(e.value(c) is not None for c in cells)]
    told = ["; ".join(filter(None, (c.note, _ahead_words(c)))) for c in cells]
    notes = [["note", *told]] if any(told) else []
    columns = [
        *settings,
        *itertools.chain.from_iterable(map(words, _READS)),
        *misses,
        *itertools.chain.from_iterable(map(words, (*_CHANGES, *measured))),
        *notes,
    ]
    return align(list(zip(*columns, strict=True))) + (f"\n{TABLE_LEGEND}" if sys.stdout.isatty() else "")


def cell_words(numbers: CellNumbers) -> list[str]:
    """Route, eviction and budget in MiB of a cell, as tables have them."""
    cell = numbers.cell
    budget = "off" if cell.budget.kind == "off" else f"{numbers.budget_mib:.1f}"
    return [route_spec(cell.route), cell.evict_spec, budget]


def align(lines: Sequence[Sequence[str]]) -> str:
    """Rows of words as columns, numbers to the right; the first line is the heading."""
    body = lines[1:]
    out = []
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = [
        all(line[i] in ("-", "off") or _is_number(line[i]) for line in body) for i in range(len(lines[0]))
    ]
    for line in lines:
        words = [w.rjust(n) if r else w.ljust(n) for w, n, r in zip(line, widths, right, strict=True)]
        out.append("  ".join(words).rstrip())
    return "\n".join(out)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def frame_table(frame: pl.DataFrame) -> str:
    """A small polars frame for reading."""

    def word(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return align([frame.columns, *([word(v) for v in row] for row in frame.iter_rows())])


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path` and rename it into place, so that nobody sees half of one."""
    try:
        with replacing(path) as temporary:
            write(temporary)
    except (OSError, *_polars_errors()) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise RunError(f"{path}: writing failed: {why}") from error


def _polars_errors() -> tuple[type[Exception], ...]:
    """What polars raises for a full disk, if it is loaded at all."""
    polars = sys.modules.get("polars")
    return (polars.exceptions.PolarsError,) if polars else ()


def say_written(path: Path) -> None:
    """Name a file that was asked for, on stderr."""
    print(f"simlab: wrote {path}", file=sys.stderr)


def write_frame(path: Path, frame: pl.DataFrame) -> None:
    """Write a frame as parquet or CSV, by the name's ending."""
    write_whole(path, lambda p: frame.write_csv(p) if path.suffix == ".csv" else frame.write_parquet(p))


class Progress:
    """The share done and the time left on stderr, for runs over two seconds.

    One line that is drawn again and again on a terminal, now and then a line of its own elsewhere.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._drawn = -math.inf
        self._width = 0

    def __call__(self, fraction: float) -> None:
        """Say that this share (0 to 1) of the work is done."""
        now = time.monotonic()
        spent = now - self._start
        terminal = sys.stderr.isatty()
        pause = _REDRAW_S if terminal else _LINE_S
        if spent < _SHOW_AFTER_S or now - self._drawn < pause or fraction <= 0:
            return
        # What a terminal shows goes away at the end; elsewhere a line would stay that says nothing.
        if fraction >= 1 and not terminal:
            return
        self._drawn = now
        text = f"{self._what}: {100 * fraction:.0f} %, about {spent / fraction - spent:.0f} s left"
        if not terminal:
            print(f"simlab: {text}", file=sys.stderr, flush=True)
            return
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
