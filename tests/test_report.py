"""The report and the sweep's page: what they say, that they need no network, that no word becomes markup."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from simlab.cells import build_cells
from simlab.charts.live import comparison_chart
from simlab.charts.pages import write_sweep_page
from simlab.charts.pictures import write_sweep_picture
from simlab.charts.sweeps import margin_chart, sweep_charts
from simlab.charts.words import budget_label, route_label
from simlab.errors import InputError
from simlab.judge.report.page import TraceReport, verdict, write_report
from simlab.judge.report.verdict import DASH, Verdict, sweep_choice
from simlab.trace.measured import Measured
from simlab.trace.store import Trace
from simlab.types import Cell, CellNumbers, Comparison, PhaseNumbers, TraceHeader

TOKENS = 100
SLOTS = 1000
HOSTILE = "</script><script>alert(1)</script><!-- & \"q\" 'a' $charts"

HEADER = TraceHeader(
    model="tiny.gguf",
    arch="qwen3moe",
    n_layer=3,
    n_expert=8,
    n_expert_used=2,
    gating="softmax",
    score_space="prob",
    weight_rule=None,
    entry_bytes={1: 1 << 20, 2: 1 << 20},
    budget_bytes=8 << 20,
    route="substitute",
    knobs={"L": 0.15},
    evict="lru",
    io_mode="direct",
    engine="simlab",
    engine_version="llama.cpp b1",
    cpu="A CPU",
    created="2026-01-02T03:04:05+00:00",
)


def numbers(
    cell: Cell, hit_rate: float | None, read: float | None, *, substituted: int = 0, dropped: int = 0,
    mass: float | None = 0.0, **live: Any,
) -> CellNumbers:  # fmt: skip
    """A cell with these decode numbers; `live` fields make it a live run."""
    phase = PhaseNumbers(
        tokens=TOKENS, lookups=200, hits=100, misses=100, hit_rate=hit_rate, cold_misses=11,
        capacity_misses=89, read_mib=100.0, read_mib_per_token=read, slots=SLOTS, reranked=400,
        substituted=substituted, dropped=dropped, evictions=50, rereads=40, mass_displaced=mass,
        score_regret=0.0, agreement=1.0,
    )  # fmt: skip
    cycles = cell.budget.amount
    return CellNumbers(
        source="live" if live else "replay", cell=cell, budget_mib=4 * cycles, budget_cycles=cycles, top_k=2,
        decode=phase, all=phase, **live,
    )  # fmt: skip


def cells(**options: Any) -> list[Cell]:
    defaults: dict[str, Any] = {"budgets": ["2cycles"], "margins": ["0", ".15", ".3"]}
    return build_cells(**defaults | options)


EXACT, PICK, WIDE = cells()
SWEEP = [
    numbers(EXACT, 0.341, 6.25),
    numbers(PICK, 0.567, 3.75, substituted=246, mass=0.0171),
    numbers(WIDE, 0.789, 1.5, substituted=471, mass=0.0634),
    *(
        numbers(c, h, r)
        for c, h, r in zip(cells(budgets=["4cycles"]), (0.6, 0.8, 0.9), (4, 2, 1), strict=True)
    ),
]
LIVE = [
    numbers(EXACT, 0.341, 6.25, tok_s=2.366, ppl=4.2352),
    numbers(
        PICK,
        0.561,
        3.81,
        substituted=251,
        mass=0.0173,
        tok_s=3.84,
        ppl=4.4024,
        ppl_ratio=1.0395,
        intervals={
            "hit_rate": (0.54, 0.58),
            "read_mib_per_token": (3.6, 4.02),
            "read_mib_saved": (2.3, 2.58),
            "dropped": (0.0, 0.0),
            "mass_displaced": (0.0161, 0.0186),
            "tok_s": (3.7, 4.0),
            "ppl": (4.1, 4.7),
            "ppl_ratio": (1.02, 1.059),
        },
    ),
    numbers(WIDE, 0.785, 1.53, substituted=473, mass=0.0636, ppl=5.36),
]
COMPARISONS = [Comparison(r, m) for r, m in zip(SWEEP, LIVE, strict=False)]


class Page(HTMLParser):
    """Rows of cells, links and scripts of a page; fails on a tag that closes what was not open."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(path.read_text("utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for n, v in attrs if n in ("src", "href", "data", "action", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts[-1] += data
            return
        if "style" not in self.open:
            self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def specs(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def points(spec: Any) -> list[dict[str, Any]]:
    """All data rows of a chart, wherever Vega-Lite keeps them."""
    found = []
    if isinstance(spec, dict):
        found += spec.get("data", {}).get("values", []) if isinstance(spec.get("data"), dict) else []
        found += [row for rows in spec.get("datasets", {}).values() for row in rows]
    for part in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        found += points(part)
    return found


RAN = Measured(2.366, 422.7, None, None, 0.341, 625.0, 6.25, None, 246, 0)


def told(**changes: Any) -> TraceReport:
    """What is told of one trace."""
    given = {
        "name": "t.trace", "header": HEADER, "tokens": {"prefill": 8, "decode": TOKENS}, "measured": RAN,
        "sweep": SWEEP, "chosen": sweep_choice(changes.get("sweep", SWEEP)), "comparisons": COMPARISONS,
    }  # fmt: skip
    return TraceReport(**cast(Any, given | changes))


def report(path: Path, *, commands: tuple[str, ...] = ("simlab sweep t.trace --margin 0,.15 > out",),
           notes: tuple[str, ...] = ("A note.",), **changes: Any) -> Page:  # fmt: skip
    write_report(path, [told(**changes)], commands=commands, notes=notes)
    return Page(path)


def said(sweep: Any, comparisons: Any) -> Verdict:
    return verdict(told(sweep=sweep, comparisons=comparisons))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(tmp_path_factory.mktemp("report") / "report.html")


def test_the_file_is_whole_small_and_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    page = report(path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_size < 5 << 20
    assert page.addresses == []
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert "default-src 'none'" in path.read_text("utf-8")
    assert "http" not in page.scripts[0]
    assert "window.vegaEmbed" in page.scripts[1]


def test_replay_stands_beside_live_with_their_labels_and_dashes(page: Page) -> None:
    rows = [r for r in page.rows if "replay (simulated)" in r or "live (measured)" in r]
    assert len(rows) == 2 * len(COMPARISONS)
    assert rows[2] == [
        "2", "L = 0.152 cycles (8 MiB)", "replay (simulated)", "56.7", "3.75", "24.6", "0.0", "1.71",
        DASH, DASH, DASH,
    ]  # fmt: skip
    assert rows[3] == [
        "live (measured)", "56.154.0 to 58.0", "3.813.60 to 4.02", "25.1", "0.0", "1.731.61 to 1.86", "3.843.7 to 4",
        "4.4024.1 to 4.7", "1.03951.0200 to 1.0590",
    ]  # fmt: skip
    assert rows[5][6:] == [DASH, "5.360", DASH]
    assert rows[4][1].startswith("L = 0.3 †")


def test_the_page_says_what_was_run_and_how_to_repeat_it(page: Page) -> None:
    facts = ("tiny.gguf", "8 per MoE layer, 2 per token", "4 MiB: what one token asks for", "direct", "A CPU",
             "8 MiB (2 token cycles)", "llama.cpp b1", "2026-01-02T03:04:05+00:00", "A note.", "†",
             "A traced run is not a benchmark run", "simlab sweep t.trace --margin 0,.15 > out")  # fmt: skip
    for fact in facts:
        assert fact in page.text
    assert ["4 cycles (16 MiB)", "L = 0.15", "80.0", "2.00", "0.0", "0.0", "0.00", "11", "89"] in page.rows


def test_the_charts_carry_the_points(page: Page) -> None:
    assert set(page.specs) == {"margin", "budget", "tradeoff", "comparison", "pareto"}
    assert {p["tok_s"] for p in points(page.specs["pareto"])} == {2.366, 3.84}
    margin = points(page.specs["margin"])
    assert {(p["margin"], round(p["miss"], 3)) for p in margin if p["budget"] == "2 cycles (8 MiB)"} == {
        (0.0, 65.9), (0.15, 43.3), (0.3, 21.1)
    }  # fmt: skip
    picks = {p["pick"]: (p["mass"], p["read"]) for p in points(page.specs["tradeoff"]) if "pick" in p}
    assert picks == {"1": (0.0, 6.25), "2": (pytest.approx(1.71), 3.75), "3": (pytest.approx(6.34), 1.5)}
    squares = points(page.specs["comparison"])
    assert any(p.get("replay") == 3.75 and p["live"] == 3.81 for p in squares)
    assert any(p.get("replay") == 24.6 and p["live"] == 25.1 for p in squares)
    assert "replay (simulated)" in json.dumps(page.specs["margin"]["title"])


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    header = dataclasses.replace(HEADER, model=HOSTILE, cpu=HOSTILE, engine_version=HOSTILE)
    page = report(tmp_path / "r.html", header=header, commands=(HOSTILE,), notes=(HOSTILE,))
    assert len(page.scripts) == 3
    assert page.text.count(HOSTILE) >= 5
    step = dataclasses.replace(PICK.route.steps[0].policy, name=HOSTILE)
    route = dataclasses.replace(PICK.route, steps=(dataclasses.replace(PICK.route.steps[0], policy=step),))
    mean = dataclasses.replace(SWEEP[1], cell=dataclasses.replace(PICK, route=route))
    page = report(tmp_path / "r.html", sweep=[SWEEP[0], mean], comparisons=[Comparison(mean, mean)])
    assert len(page.scripts) == 3
    assert any(HOSTILE in p.get("route", "") for p in points(page.specs["tradeoff"]))


def test_the_verdict_is_the_largest_cut_at_little_perplexity() -> None:
    sentence, how = said(SWEEP, COMPARISONS)
    assert sentence == (
        "At 2 token cycles (8 MiB), L = 0.15 cuts flash reads from 6.25 to 3.81 MiB per token, 2.44 [2.30, 2.58] "
        "less, live (measured), perplexity +3.9 % [+2.0, +5.9] (4.235 to 4.402); replay predicted 3.75 MiB."
    )
    assert "95 % intervals, block bootstraps" in how
    assert "2 lossy cells" in how
    assert "at most 0.06 MiB per token and 0.6 points of hit rate over 3 cells" in how


def test_the_verdict_without_perplexity_or_baseline_or_live_runs() -> None:
    blind = [Comparison(c.replay, dataclasses.replace(c.live, ppl=None)) for c in COMPARISONS]
    assert "L = 0.3 cuts flash reads from 6.25 to 1.53" in said(SWEEP, blind)[0]
    assert "perplexity not measured" in said(SWEEP, blind)[0]
    alone, how = said(SWEEP, COMPARISONS[1:2])
    assert "reads 3.81 [3.60, 4.02] MiB per token, live (measured); replay predicted 3.75 MiB" in alone
    assert "No lossy cell was run live beside" in how
    costly = [COMPARISONS[0], COMPARISONS[2]]
    assert "perplexity +26.6 % (4.235 to 5.360)" in said(SWEEP, costly)[0]
    simulated, how = said(SWEEP[:3], [])
    assert "would cut flash reads from 6.25 to 3.75" in simulated
    assert "replay (simulated)" in simulated
    assert "Nothing was run live" in how
    assert "No interval" in how
    # The first cell being no exact one, its perplexity is no base for an interval.
    assert "perplexity +3.9 % (4.235 to 4.402)" in said(SWEEP, COMPARISONS[2:0:-1] + COMPARISONS[:1])[0]
    assert said([], [])[0] == "Nothing was run live, and the sweep has no numbers."


def test_a_report_of_nothing_still_opens(tmp_path: Path) -> None:
    page = report(
        tmp_path / "r.html", measured=None, sweep=[], comparisons=[], commands=(), notes=(),
        header=dataclasses.replace(HEADER, budget_bytes=None, route=None, cpu=None, io_mode=None),
    )  # fmt: skip
    assert page.specs == {}
    assert "not known" in page.text


def test_numbers_that_are_missing_are_dashes_and_leave_the_charts(tmp_path: Path) -> None:
    empty = numbers(EXACT, None, None, mass=None)
    page = report(tmp_path / "r.html", sweep=[empty], comparisons=[Comparison(empty, LIVE[0])])
    assert next(r for r in page.rows if "replay (simulated)" in r)[3:5] == [DASH, DASH]
    assert set(page.specs) == {"comparison"}


def test_a_sweep_page_names_series_by_what_differs(tmp_path: Path) -> None:
    both = [
        numbers(c, 0.5, 1.0)
        for c in cells(margins=["0", ".1"]) + cells(margins=["0", ".1"], scope="per_layer")
    ]
    trace = cast(Trace, SimpleNamespace(header=HEADER))
    write_sweep_page(tmp_path / "s.html", both, trace)
    page = Page(tmp_path / "s.html")
    assert page.addresses == []
    assert {p["series"] for p in points(page.specs["margin"])} == {
        "2 cycles (8 MiB), global", "2 cycles (8 MiB), per layer"
    }  # fmt: skip
    assert "replay (simulated)" in page.text


def test_a_sweep_page_without_margin_or_mass_says_so(tmp_path: Path) -> None:
    wide = [numbers(c, 0.5, 1.0, mass=None) for c in cells(margins=[], top_ks=["1"])]
    write_sweep_page(tmp_path / "s.html", wide, cast(Trace, SimpleNamespace(header=HEADER)))
    page = Page(tmp_path / "s.html")
    assert page.specs == {}
    assert "nothing to draw" in page.text


def test_the_routers_own_routing_stands_at_margin_zero() -> None:
    (original,) = cells(margins=[])
    (dropping,) = cells(margins=[], drops=[".5"])
    rows = points(margin_chart([numbers(original, 0.4, 1.0), numbers(dropping, 0.9, 1.0)]).to_dict())
    assert {(r["margin"], r["route"]) for r in rows} == {(0.0, "original routing")}
    charts = sweep_charts([numbers(dropping, 0.9, 1.0)])
    assert list(charts) == ["tradeoff"]


def test_points_that_coincide_share_a_label() -> None:
    rows = points(comparison_chart([COMPARISONS[0], COMPARISONS[0]]).to_dict())
    assert "1, 2" in {r.get("pick") for r in rows}


@pytest.mark.parametrize(
    ("budget", "label"),
    [
        ("1cycle", "1 cycle (4 MiB)"),
        ("2000MiB", "2,000 MiB (2.5 cycles)"),
        ("48/layer", "48 per layer (123 MiB)"),
        ("25%", "25 % of experts (12.3 MiB)"),
        ("off", "no cache"),
    ],
)
def test_budget_labels(budget: str, label: str) -> None:
    (cell,) = cells(budgets=[budget], margins=[])
    mib = {"1cycle": 4.0, "2000MiB": 2000.0, "48/layer": 123.4, "25%": 12.34, "off": 0.0}[budget]
    known = dataclasses.replace(numbers(cell, 0.5, 1.0), budget_mib=mib, budget_cycles=2.5)
    assert budget_label(known) == label


@pytest.mark.parametrize(
    ("route", "label"),
    [
        ("substitute:L=.15+drop_cold:F=.75,renorm=0", "L = 0.15, drop F = 0.75, renorm = 0"),
        ("top_k:k=1", "top_k k = 1"),
        ("original", "original routing"),
    ],
)
def test_route_labels(route: str, label: str) -> None:
    (cell,) = cells(routes=[route], margins=[])
    assert route_label(cell) == label


def test_a_sweep_is_one_picture_on_white(tmp_path: Path) -> None:
    write_sweep_picture(tmp_path / "s.svg", SWEEP)
    text = (tmp_path / "s.svg").read_text("utf-8")
    assert text.startswith("<svg")
    assert "Decode miss rate against margin" in text
    assert 'fill="white"' in text
    with pytest.raises(InputError, match="nothing to draw"):
        write_sweep_picture(tmp_path / "t.svg", [numbers(cells(margins=[])[0], 0.5, 1.0, mass=None)])
