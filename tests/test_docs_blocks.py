"""Every block of commands or Python on every page runs, in the page's order, as a reader would run it.

A page runs in a scratch folder that has what its reader has: `docs_files.make_files`. A command of simlab runs in this
process through `simlab.cli.main.main`, which is what the console script calls; anything else runs in a shell. A block
is left out only with a mark on the line before it that gives the reason, and there are few of them:

    <!-- not run: it trains for an hour -->

A Python block that a page tells its reader to save is written to that file, too:

    <!-- file: flat_bonus.py -->
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs_files import make_files

pytest.importorskip(
    "llama_cpp", reason="the live engine's extra is not installed: pip install 'simlab[engine]'"
)
pytest.importorskip("vl_convert", reason="the charts extra is not installed: pip install 'simlab[charts]'")

from simlab.cli.main import build_parser, main

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
MOST_LEFT_OUT = 26
LANGUAGES = {"sh", "python"}
_FENCE = re.compile(r"^```(?P<language>\S*)[ \t]*$(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (?P<kind>not run|file): (?P<what>[^\n]+?) -->[ \t]*\n+$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    body: str
    not_run: str | None
    """Why it is left out."""
    file: str | None
    """What its reader saves it as."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in _FENCE.finditer(text):
        mark = _MARK.search(text[: found.start()])
        said = {mark["kind"]: mark["what"]} if mark else {}
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found["language"], found["body"], said.get("not run"), said.get("file"))


ALL = [block for page in PAGES for block in blocks_of(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [b for b in ALL if b.page == page and b.language in LANGUAGES and not b.not_run]
    if not wanted:
        pytest.skip("no block on this page is to be run")
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in wanted:
        if block.language == "python":
            run_python(block)
        else:
            for command in commands(block):
                run_command(block, command)


def run_python(block: Block) -> None:
    if block.file is not None:
        Path(block.file).write_text(block.body, "utf-8")
    code = compile("\n" * block.line + block.body, block.name, "exec")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, {"__name__": "__main__"})


def commands(block: Block) -> list[str]:
    """The commands of a block: one a line, a line that ends in a backslash going on in the next."""
    lines = block.body.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def run_command(block: Block, command: str) -> None:
    words = shlex.split(command, comments=True)
    shell = any(mark in command for mark in ("&&", "|", ";", "$", "*"))
    if words[0] != "simlab" or shell:
        paths = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-ec", command], env=paths, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{block.name}: {command}\n{done.stdout}{done.stderr}"
        return
    target = None
    if ">" in words:
        *words, _, target = words
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words[1:])
    assert status == 0, f"{block.name}: {command}\n{err.getvalue()}"
    if target is not None:
        Path(target).write_text(out.getvalue(), "utf-8")


# ---------------------------------------------------------------------------------------------------------
# The pages themselves


def test_blocks_left_out_are_few_and_say_why() -> None:
    left_out = [b for b in ALL if b.not_run]
    assert len(left_out) <= MOST_LEFT_OUT, "\n".join(f"{b.name}: {b.not_run}" for b in left_out)
    for block in left_out:
        assert len(block.not_run.split()) >= 3, f"{block.name}: {block.not_run} is no reason"  # type: ignore[union-attr]


def test_commands_left_out_are_commands_all_the_same() -> None:
    """Their words are a command line that simlab takes."""
    for block in ALL:
        if block.language == "sh" and block.not_run:
            for command in commands(block):
                words = shlex.split(command, comments=True)
                if words[0] == "simlab":
                    build_parser().parse_args(words[1:])


def test_commands_stand_in_blocks_that_are_run() -> None:
    """No command hides in a block of another language or in an indented one."""
    for block in ALL:
        assert block.language in LANGUAGES or not re.search(
            r"^\$? ?(simlab|pip|python3?) ", block.body, re.MULTILINE
        ), f"{block.name}: is a block of commands; write ```sh"
    for page in PAGES:
        outside = _FENCE.sub("", page.read_text("utf-8"))
        found = re.search(r"^(?: {4}|\t)\$? ?(?:simlab|pip|python3?) .*$", outside, re.MULTILINE)
        assert found is None, f"{page.name}: '{found[0].strip()}' stands in no ```sh block"  # type: ignore[index]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: there is no {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    links = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text("utf-8")))
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        assert name == "README.md" or name in links, f"README.md has no link to {name}"


def test_the_commands_named_in_text_exist() -> None:
    """A `simlab word` in running text is a command there is."""
    known = set(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]
    for page in PAGES:
        for word in re.findall(r"`simlab ([a-z]+)", page.read_text("utf-8")):
            assert word in known, f"{page.name}: there is no simlab {word}"
