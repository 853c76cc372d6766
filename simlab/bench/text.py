"""The figures of `simlab bench replay` for reading."""

from __future__ import annotations

from typing import Any

from simlab.cli.output import align


def _ns(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f}[{spread['low']:.1f}..{spread['high']:.1f}]"


def _times(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f}[{spread['low']:.2f}..{spread['high']:.2f}]"


def comparison(found: dict[str, Any]) -> str:
    """The replayer beside the others."""
    work = found["workload"]
    equal = found["slots_equal"]
    lines = [["", "whole ns", "alone ns", "whole / replayer's", "alone / replayer's"]]
    for row in found["contenders"]:
        lines.append(
            [
                row["name"],
                _ns(row["whole_ns"]),
                _ns(row["alone_ns"]),
                _times(row["whole_ratio"]),
                _times(row["alone_ratio"]),
            ]
        )
    stages = ", ".join(f"{name} {_times(s)} s" for name, s in found["replayer_stages_s"].items())
    return "\n".join(
        [
            f"{work['trace']}: {work['rows']} routing events, {work['layers']} MoE layers, {work['experts']} experts, "
            f"top {work['k']}; {work['cells']} cells, {found['repeats']} repeats in turns",
            f"Equal before timing: all counts of {found['cells_equal']} cells, {equal['slots']} slots of "
            f"{equal['cells']} cells",
            "",
            "Nanoseconds per routing event and cell, and times the replayer's; median [least..most].",
            "Whole is from the trace's folder to the counts; alone leaves out reading and preparing the rows.",
            align(lines),
            f"replayer: first call in this process {found['first_run_s']:.2f} s, "
            f"later {_times(found['replayer_s'])} s: {stages}",
        ]
    )
