import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="Policy or working set")


@app.cell
def _():
    from pathlib import Path

    import marimo as mo

    from simlab.cells import build_cells
    from simlab.charts.anatomy import along_chart, layer_chart, reuse_chart, standing_chart
    from simlab.charts.grids import grid_chart
    from simlab.charts.theme import MISS_TITLE, in_notebook
    from simlab.errors import SimlabError
    from simlab.judge import explore
    from simlab.judge.misses.explain import explain
    from simlab.judge.misses.explain_text import sections, subtitle

    traces = (mo.notebook_dir() or Path.cwd()).parent / "traces"
    return (
        MISS_TITLE,
        SimlabError,
        along_chart,
        build_cells,
        explain,
        explore,
        grid_chart,
        in_notebook,
        layer_chart,
        mo,
        reuse_chart,
        sections,
        standing_chart,
        subtitle,
        traces,
    )


@app.cell
def _(mo):
    mo.md("""
    # Policy or working set

    A cache misses because an expert is used for the first time, because the eviction policy threw it out though
    Belady, who knows the future, would have kept it, or because the budget has no room for it. Only the second kind
    is won by a better policy; against the third helps a larger budget, or routing that prefers what is resident.
    """)
    return


@app.cell
def _(explore, mo, traces):
    shipped, typed = explore.trace_picker(mo, traces)
    eviction, scope = explore.cache_picker(mo)
    mo.vstack([mo.hstack([shipped, eviction, scope], justify="start", gap=2, wrap=True), typed])
    return eviction, scope, shipped, typed


@app.cell
def _(SimlabError, explore, mo, shipped, traces, typed):
    trace, problem = None, ""
    try:
        trace = explore.chosen_trace(traces, shipped.value, typed.value)
    except SimlabError as error:
        problem = str(error)
    mo.stop(trace is None, mo.callout(problem, kind="danger"))
    return (trace,)


@app.cell
def _(explore, mo, trace):
    steps = explore.budget_steps(trace.header)
    budget = mo.ui.slider(
        steps=steps,
        value=min(steps, key=lambda cycles: abs(cycles - 2)),
        label="Budget (token cycles)",
        show_value=True,
    )
    budget
    return (budget,)


@app.cell
def _(SimlabError, budget, build_cells, eviction, explain, mo, scope, trace):
    found, refused = None, ""
    with mo.status.spinner("Replaying; the first time a program is compiled for this eviction"):
        try:
            (cell,) = build_cells(
                budgets=[f"{budget.value:g}cycles"],
                routes=["original"],
                evicts=[eviction.value],
                scope=scope.value,
            )
            found = explain(trace, cell)
        except SimlabError as error:
            refused = str(error)
    mo.stop(found is None, mo.callout(refused, kind="danger"))
    return (found,)


@app.cell
def _(found, mo, subtitle):
    def percent(rate):
        low, high = rate.interval
        return f"{100 * rate.value:.1f} %", f"95 %: {100 * low:.1f} to {100 * high:.1f}"

    counts = found.decode.counts
    hit, hit_interval = percent(found.decode.hit_rate)
    best, best_interval = percent(found.decode.optimum_hit_rate)
    tiles = [
        mo.stat(hit, "Decode hit rate", hit_interval),
        mo.stat(best, "Belady at this budget", best_interval),
        *(
            mo.stat(
                f"{100 * counts[kind] / max(counts['misses'], 1):.0f} %", words, f"{counts[kind]:,} misses"
            )
            for kind, words in (
                ("cold", "Cold misses"),
                ("policy", "Misses Belady hits"),
                ("budget", "Misses Belady has too"),
            )
        ),
    ]
    if mo.app_meta().mode == "script":
        print(
            f"{subtitle(found)}: decode hit rate {hit} (replay (simulated); {hit_interval}), {found.verdict.kind}"
        )
    mo.vstack(
        [
            mo.callout(
                mo.md(f"**{found.verdict.sentence}**\n\n{subtitle(found)}, replay (simulated)"), kind="info"
            ),
            mo.hstack(tiles, justify="start", gap=0, wrap=True),
        ]
    )
    return


@app.cell
def _(along_chart, found, in_notebook, mo, standing_chart):
    mo.hstack(
        [
            in_notebook(standing_chart(found)),
            in_notebook(along_chart(found)),
        ],
        justify="start",
        gap=2,
        wrap=True,
    )
    return


@app.cell
def _(mo):
    mo.md("""
    ## The misses, taken apart

    Every figure is of the decode alone, and of a replay (simulated).
    """)
    return


@app.cell
def _(MISS_TITLE, found, grid_chart, in_notebook, layer_chart, mo, reuse_chart, standing_chart):
    where = grid_chart(found.grid, "miss_percent", "Where and when it misses", MISS_TITLE)
    mo.hstack(
        [
            in_notebook(chart)
            for chart in (standing_chart(found, "read"), reuse_chart(found), layer_chart(found), where)
        ],
        justify="start",
        gap=2,
        wrap=True,
    )
    return


@app.cell
def _(found, mo, sections):
    def table(part):
        head, *rows = part.table
        return mo.ui.table(
            [dict(zip(head, row, strict=True)) for row in rows], selection=None, pagination=False
        )

    mo.accordion(
        {
            part.title: mo.vstack([mo.md("\n\n".join(part.lines)), *([table(part)] if part.table else [])])
            for part in sections(found)
        }
    )
    return


if __name__ == "__main__":
    app.run()
