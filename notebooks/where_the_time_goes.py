import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="Where the time goes")


@app.cell
def _():
    from pathlib import Path

    import marimo as mo

    from simlab.cells import build_cells
    from simlab.charts.theme import in_notebook
    from simlab.charts.times import (
        along_time_chart,
        read_latency_chart,
        read_size_chart,
        speed_chart,
        split_chart,
    )
    from simlab.charts.words import LIVE_LABEL, REPLAY_LABEL
    from simlab.errors import SimlabError
    from simlab.judge import explore, explore_time
    from simlab.judge.speed.read_lanes import reads_by_size_and_lane
    from simlab.judge.speed.trace_time import read_latencies

    traces = (mo.notebook_dir() or Path.cwd()).parent / "traces"
    return (
        LIVE_LABEL,
        REPLAY_LABEL,
        SimlabError,
        along_time_chart,
        build_cells,
        explore,
        explore_time,
        in_notebook,
        mo,
        read_latencies,
        read_latency_chart,
        read_size_chart,
        reads_by_size_and_lane,
        speed_chart,
        split_chart,
        traces,
    )


@app.cell
def _(mo):
    mo.md("""
    # Where the time goes

    A token computes, waits for the experts it misses, and moves them in and out of the cache. What the engine
    measured when the trace was recorded stands first; below, a margin and a budget of your choice are replayed and
    the time of their tokens is foretold from it.
    """)
    return


@app.cell
def _(explore, mo, traces):
    shipped, typed = explore.trace_picker(mo, traces)
    mo.vstack([shipped, typed])
    return shipped, typed


@app.cell
def _(SimlabError, explore, explore_time, mo, shipped, traces, typed):
    trace, teller, problem = None, None, ""
    try:
        trace = explore.chosen_trace(traces, shipped.value, typed.value)
        teller = explore_time.foreteller(trace)
    except SimlabError as error:
        problem = str(error)
    mo.stop(teller is None, mo.callout(problem, kind="danger"))
    timings, header = teller.timings, trace.header
    return header, teller, timings, trace


@app.cell
def _(LIVE_LABEL, explore_time, mo, timings):
    parts = explore_time.measured_parts(timings)
    speed = explore_time.measured_speed(timings)
    bounds = f"{LIVE_LABEL}, 95 %: {speed.interval.low:.1f} to {speed.interval.high:.1f}"
    tiles = [
        mo.stat(f"{speed.tok_s:.1f}", "Tokens per second", bounds),
        *(
            mo.stat(
                f"{ms:.2f} ms", name.capitalize(), f"{100 * ms / sum(parts.values()):.0f} % of a token's time"
            )
            for name, ms in parts.items()
        ),
    ]
    if mo.app_meta().mode == "script":
        print(f"{speed.tok_s:.1f} tokens/s ({bounds})")
    mo.hstack(tiles, justify="start", gap=0, wrap=True)
    return (parts,)


@app.cell
def _(along_time_chart, header, in_notebook, mo, read_latencies, read_latency_chart, timings, trace):
    latencies = read_latencies(trace)
    shown = [along_time_chart(timings)]
    if latencies.height:
        shown.append(read_latency_chart(latencies, header.io_mode))
    mo.hstack([in_notebook(chart) for chart in shown], justify="start", gap=2, wrap=True)
    return


@app.cell
def _(header, in_notebook, mo, read_size_chart, reads_by_size_and_lane, trace):
    reads = reads_by_size_and_lane(trace)
    mo.stop(
        not reads.height, mo.md("The trace has no single reads, so their sizes and latencies are not known.")
    )
    in_notebook(read_size_chart(reads, header.io_mode))
    return


@app.cell
def _(mo):
    mo.md("""
    ## Other cells, foretold

    The misses of a replay go through what the recorded reads, moves and computing took. Intervals are for a run as
    long as the recorded one, on this machine at another moment.
    """)
    return


@app.cell
def _(explore, header, mo):
    steps = explore.budget_steps(header)
    budget = mo.ui.slider(
        steps=steps,
        value=min(steps, key=lambda cycles: abs(cycles - 2)),
        label="Budget (token cycles)",
        show_value=True,
    )
    margin = mo.ui.slider(
        steps=[float(m) for m in explore.MARGINS], value=0.15, label="Margin L", show_value=True
    )
    mo.hstack([budget, margin], justify="start", gap=3, wrap=True)
    return budget, margin


@app.cell
def _(SimlabError, budget, build_cells, explore_time, margin, mo, teller, trace):
    told, refused = None, ""
    with mo.status.spinner("Replaying; the first time a program is compiled"):
        try:
            (cell,) = build_cells(budgets=[f"{budget.value:g}cycles"], margins=[f"{margin.value:g}"])
            told = explore_time.foretold(trace, teller, cell)
        except SimlabError as error:
            refused = str(error)
    mo.stop(told is None, mo.callout(refused, kind="danger"))
    return (told,)


@app.cell
def _(LIVE_LABEL, REPLAY_LABEL, budget, explore_time, in_notebook, margin, mo, parts, split_chart, told):
    low, high = told.tok_s_interval
    wait_low, wait_high = told.read_wait_interval
    mo.vstack(
        [
            mo.hstack(
                [
                    mo.stat(
                        f"{told.tok_s:.1f}",
                        "Foretold tokens per second",
                        f"{REPLAY_LABEL}, 95 %: {low:.1f} to {high:.1f}",
                    ),
                    mo.stat(
                        f"{told.read_wait_ms:.2f} ms",
                        "Foretold wait for reads",
                        f"{REPLAY_LABEL}, 95 %: {wait_low:.2f} to {wait_high:.2f}",
                    ),
                    mo.stat(told.bound, "Foretold largest part", REPLAY_LABEL),
                ],
                justify="start",
                gap=0,
                wrap=True,
            ),
            in_notebook(
                split_chart(
                    {
                        f"recorded, {LIVE_LABEL}": parts,
                        f"L = {margin.value:g}, {budget.value:g} cycles, {REPLAY_LABEL}": explore_time.foretold_parts(
                            told
                        ),
                    }
                )
            ),
        ]
    )
    return


@app.cell
def _(mo):
    mo.md("""
    ## Foretold against live

    Recordings of the same text beside this one ran under other cells. What this trace foretells for them stands
    beside what they measured; runs that were not interleaved differ by the machine's moods too
    (`simlab time T.trace --check` runs cells in turns).
    """)
    return


@app.cell
def _(SimlabError, explore_time, in_notebook, mo, speed_chart, teller, trace):
    pairs, missing = [], "There is no other recording of this text beside the trace."
    with mo.status.spinner("Replaying the cells of the other recordings"):
        try:
            pairs = explore_time.speeds(trace, teller, explore_time.alike(trace))
        except SimlabError as error:
            missing = str(error)
    mo.stop(not pairs, mo.md(missing))
    in_notebook(speed_chart(pairs))
    return


if __name__ == "__main__":
    app.run()
