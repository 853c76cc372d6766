"""The notebooks, as scripts and as apps in a browser: their numbers, their sliders, their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import polars as pl
import pytest
from browser import STEP_MS, Watched, chromium, marimo_server

from simlab.trace.store import open_trace
from simlab.types import DECODE, THROW_AWAY_TURN

pytest.importorskip("marimo")
pytest.importorskip("altair")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Programs that one process compiles are there for the next: JAX's own cache, in a folder of this run."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("jax")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Faster to compile; each program runs a few times only.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }


def recorded(name: str) -> tuple[float, float, float]:
    """Decode miss rate and hit rate in per cent, and tokens/s, of a shipped trace as it was recorded."""
    trace = open_trace(ROOT / "traces" / name)
    tokens = trace.tokens.filter((pl.col("phase") == DECODE) & (pl.col("turn") != THROW_AWAY_TURN)).collect()
    hit = 100 * float(tokens["hits"].sum()) / float(tokens["lookups"].sum())
    return 100 - hit, hit, 1e9 * tokens.height / float(tokens["wall_ns"].sum())


def run_script(name: str, environment: dict[str, str], *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "error", NOTEBOOKS / f"{name}.py", *arguments],
        env=os.environ | environment,
        cwd=NOTEBOOKS,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    return found.stdout


@pytest.mark.slow
def test_margins_run_as_a_script_on_a_path(compiled: dict[str, str]) -> None:
    # A replay under the margin it was recorded with gives back what was recorded.
    path = str(ROOT / "traces" / "margin-0.15.trace")
    out = run_script("margin_against_miss_rate", compiled, "--trace", path)
    assert out.startswith(
        f"L = 0.15: decode miss rate {recorded('margin-0.15.trace')[0]:.1f} % (replay (simulated);"
    )


@pytest.mark.slow
def test_misses_run_as_a_script(compiled: dict[str, str]) -> None:
    out = run_script("policy_or_working_set", compiled)
    assert f"decode hit rate {recorded('original.trace')[1]:.1f} % (replay (simulated);" in out
    assert out.strip().endswith("working set")


@pytest.mark.slow
def test_times_run_as_a_script(compiled: dict[str, str]) -> None:
    out = run_script("where_the_time_goes", compiled)
    assert out.startswith(f"{recorded('original.trace')[2]:.1f} tokens/s (live (measured), 95 %:")


def test_a_notebook_is_exported_for_jupyter(tmp_path: Path) -> None:
    source, out = NOTEBOOKS / "where_the_time_goes.py", tmp_path / "n.ipynb"
    command = [sys.executable, "-m", "marimo", "-q", "export", "ipynb", str(source), "-o", str(out)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == source.read_text().count("@app.cell")
    assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}


@pytest.fixture(scope="module")
def app(compiled: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    log = tmp_path_factory.mktemp("marimo") / "log.txt"
    with chromium() as browser, marimo_server(NOTEBOOKS, compiled, log) as address:
        yield browser, address


class Notebook:
    """A notebook open in the browser."""

    def __init__(self, app: tuple[Any, str], name: str) -> None:
        browser, address = app
        self.seen = Watched(browser)
        self.page = self.seen.page
        self.page.goto(f"{address}/?file={name}.py")

    def stat(self, label: str, unlike: str = "") -> str:
        """The number of a tile; once it is another than `unlike`, if that is given."""
        tile = f"marimo-stat[data-label='\"{label}\"']"
        self.page.wait_for_function(
            """([tile, unlike]) => {
                const found = document.querySelector(tile);
                return found && !(unlike && JSON.parse(found.dataset.value).split(" ")[0] === unlike);
            }""",
            arg=[tile, unlike],
        )
        return json.loads(self.page.locator(tile).get_attribute("data-value") or "").split(" ")[0]

    def move(self, label: str, key: str = "ArrowRight") -> None:
        """Move the slider of a label by one step."""
        self.page.locator(f"marimo-slider[data-label*='{label}']").locator("[role=slider]").press(key)

    def picture(self, title: str, unlike: str = "") -> str:
        """What the chart of that title looks like; once it is another than `unlike`, if that is given."""
        canvas = self.page.locator(f'[role=graphics-document][aria-label="{title}"] canvas')
        until = time.monotonic() + STEP_MS / 1000
        while True:
            # Of all at once: a chart that is just being replaced is none or two.
            pictures = canvas.evaluate_all("found => found.map(canvas => canvas.toDataURL())")
            if len(pictures) == 1 and pictures[0] != unlike:
                return pictures[0]
            assert time.monotonic() < until, f"{title}: is not drawn anew"
            self.page.wait_for_timeout(50)

    def fits(self, width: int) -> None:
        """Nothing hangs over the edge of a window so wide."""
        self.page.set_viewport_size({"width": width, "height": 900})
        edges = self.page.locator(".chart-wrapper, marimo-stat").evaluate_all(
            "found => found.map(element => element.getBoundingClientRect().right)"
        )
        assert edges
        assert max(edges) <= width

    def close(self) -> None:
        """Nobody outside was asked for anything, and no error was logged."""
        hosts = {urlsplit(url).hostname for url in self.seen.requests if url.startswith(("http", "ws"))}
        assert hosts == {"127.0.0.1"}
        assert self.seen.errors == []
        self.page.close()


@pytest.mark.slow
def test_the_margin_slider_and_a_click_replay_anew(app: tuple[Any, str]) -> None:
    notebook = Notebook(app, "margin_against_miss_rate")
    curve, grid = "Decode miss rate against margin, by cache budget", "Where and when the routing changed"
    first = notebook.stat("Decode miss rate")
    pictures = notebook.picture(curve), notebook.picture(grid)
    notebook.move("Margin L")
    second = notebook.stat("Decode miss rate", unlike=first)
    assert float(second) < float(first)
    assert float(notebook.stat("Router mass displaced")) > 0
    changed = notebook.picture(curve, unlike=pictures[0])
    notebook.picture(grid, unlike=pictures[1])
    notebook.move("Budget")
    third = notebook.stat("Decode miss rate", unlike=second)
    assert float(third) < float(second)
    changed = notebook.picture(curve, unlike=changed)
    # A click between the last points of the lines chooses the nearest margin.
    notebook.page.get_by_label(curve).click(position={"x": 350, "y": 250})
    assert float(notebook.stat("Decode miss rate", unlike=third)) < float(third)
    notebook.picture(curve, unlike=changed)
    notebook.fits(800)
    path = notebook.page.get_by_label("or a path of your own")
    path.fill("/nowhere/at.trace")
    path.press("Enter")
    notebook.page.get_by_text("/nowhere/at.trace:").wait_for()
    assert "Traceback" not in notebook.page.inner_text("body")
    notebook.close()


@pytest.mark.slow
def test_the_budget_slider_explains_anew(app: tuple[Any, str]) -> None:
    notebook = Notebook(app, "policy_or_working_set")
    first = notebook.stat("Decode hit rate")
    picture = notebook.picture("Where this budget stands")
    notebook.move("Budget")
    assert float(notebook.stat("Decode hit rate", unlike=first)) > float(first)
    notebook.picture("Where this budget stands", unlike=picture)
    notebook.fits(800)
    notebook.close()


@pytest.mark.slow
def test_the_margin_slider_foretells_anew(app: tuple[Any, str]) -> None:
    notebook, split = Notebook(app, "where_the_time_goes"), "What a token's time is made of"
    assert notebook.stat("Tokens per second") == f"{recorded('original.trace')[2]:.1f}"
    first = notebook.stat("Foretold tokens per second")
    picture = notebook.picture(split)
    notebook.move("Margin L")
    assert float(notebook.stat("Foretold tokens per second", unlike=first)) > float(first)
    notebook.picture(split, unlike=picture)
    notebook.picture("Foretold against live")
    notebook.fits(800)
    notebook.close()
