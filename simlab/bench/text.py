"""The figures of `simlab bench replay` for reading."""

from __future__ import annotations

from typing import Any

from simlab.bench.history import TIMES
from simlab.cli.output import align


def _ns(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f}[{spread['low']:.1f}..{spread['high']:.1f}]"


def _times(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f}[{spread['low']:.2f}..{spread['high']:.2f}]"


def comparison(found: dict[str, Any]) -> str:
    """The replayer beside the others."""
    work = found["workload"]
    equal = found["slots_equal"]
    lines = [["", *(f"{which} ns" for which in TIMES), *(f"{which} / replayer's" for which in TIMES)]]
    for row in found["contenders"]:
        lines.append(
            [
                row["name"],
                *(_ns(row[f"{which}_ns"]) for which in TIMES),
                *(_times(row[f"{which}_ratio"]) for which in TIMES),
            ]
        )
    stages = ", ".join(f"{name} {_times(s)} s" for name, s in found["replayer_stages_s"].items())
    return "\n".join(
        [
            f"{work['trace']}: {work['rows']} routing events, {work['layers']} MoE layers, {work['experts']} experts, "
            f"top {work['k']}; {work['cells']} cells, {found['repeats']} repeats in turns",
            f"Equal before timing: all counts of {found['cells_equal']} cells at {found['stops_equal']} places, "
            f"{equal['slots']} slots of {equal['cells']} cells",
            "",
            "Nanoseconds per routing event and cell, and times the replayer's; median [least..most].",
            "Whole is from the trace's folder to the counts; memory is from the decoded tables to the counts; alone is",
            "whole without reading and preparing the rows, of which the replayer has more to do than the loops.",
            align(lines),
            f"replayer: first call in this process {found['first_run_s']:.2f} s, "
            f"later {_times(found['replayer_s'])} s: {stages}",
            *(
                f"{row['name']}: {_times(row['times_one_core'])} times as fast, alone, as on one core"
                for row in found["contenders"]
                if "times_one_core" in row
            ),
        ]
    )


def long_trace(found: dict[str, Any]) -> str:
    """A long trace beside one of 1,000 tokens."""
    peak, scores = found["peak_rss_bytes"] / 2**20, found["score_bytes"] / 2**20
    return (
        f"{found['tokens']} tokens, {found['cells']} cells, {scores:.0f} MiB of scores: {found['seconds']:.1f} s in a "
        f"process of its own, peak memory {peak:.0f} MiB (after the short ones "
        f"{found['short_peak_rss_bytes'] / 2**20:.0f} MiB); {1e3 * found['s_per_token']:.3f} ms per token, "
        f"{found['ratio']:.2f} times the {1e3 * found['short_s_per_token']:.3f} ms of {found['short_tokens']} tokens"
    )


_COLUMNS = {
    "first_run_s": "first call s",
    "replayer_whole_ns": "replayer whole ns",
    "replayer_alone_ns": "alone ns",
    "numba_1_core_alone_ns": "numba 1 core alone ns",
    "numba_parallel_alone_ns": "numba parallel alone ns",
    "runs": "runs",
}


def scaling(found: dict[str, list[dict[str, Any]]]) -> str:
    """One table per axis; nanoseconds per routing event and cell."""
    tables = []
    for axis, points in found.items():
        lines = [[axis, *_COLUMNS.values(), ""]]
        for point in points:
            values = [point.get(name) for name in _COLUMNS]
            words = ["-" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in values]
            lines.append([str(point[axis]), *words, point.get("skipped", "")])
        tables.append(align(lines))
    return "\n\n".join(tables)


def command_sweep(found: dict[str, Any]) -> str:
    """The 54 cells on a recorded trace."""
    lines = [["", "seconds"]]
    lines += [
        ["the whole command, no compilation cache", _times(found["command_without_cache_s"])],
        ["the whole command, compilation cache filled", _times(found["command_with_cache_s"])],
        ["first call in a process that has JAX loaded", f"{found['first_in_process_s']:.2f}"],
        ["warm call", _times(found["warm_s"])],
        *([f"  {name}", _times(s)] for name, s in found["stages_s"].items()),
    ]
    head = f"{found['trace']}: {found['cells']} cells, {found['repeats']} repeats; median [least..most]"
    return head + "\n" + align(lines)


def change(past: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Now beside an earlier run."""
    lines = [["", *(word for which in TIMES for word in (f"{which} then", "now", "now / then"))]]
    for row in rows:
        words = []
        for which in TIMES:
            then, now = row.get(f"{which}_then_ns"), row.get(f"{which}_now_ns")
            if then is None or now is None:
                words += ["-"] * 3
            else:
                words += [f"{then:.1f}", f"{now:.1f}", f"{now / then:.2f}"]
        lines.append([row["name"], *words])
    return f"Against {past['commit']} of {past['date']}, nanoseconds:\n" + align(lines)
