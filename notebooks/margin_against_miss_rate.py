import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="Margin against miss rate")


@app.cell
def _():
    from pathlib import Path

    import marimo as mo

    from simlab.charts.grids import expert_chart, grid_chart
    from simlab.charts.sweeps import margin_chart, price_chart, tradeoff_chart
    from simlab.charts.theme import in_notebook
    from simlab.charts.words import LIVE_LABEL, REPLAY_LABEL
    from simlab.errors import SimlabError
    from simlab.judge import explore

    traces = (mo.notebook_dir() or Path.cwd()).parent / "traces"
    return (
        LIVE_LABEL,
        Path,
        REPLAY_LABEL,
        SimlabError,
        expert_chart,
        explore,
        grid_chart,
        margin_chart,
        mo,
        price_chart,
        in_notebook,
        tradeoff_chart,
        traces,
    )


@app.cell
def _(mo):
    mo.md("""
    # Margin against miss rate

    Substitution steers near-tie routings to experts that are in RAM already, up to a margin L of the token's
    score range. How many misses does a margin save, what does it cost, and which experts does it change, where
    and when? Move the sliders, or click a point of the first chart: the trace is replayed under each setting.
    """)
    return


@app.cell
def _(explore, mo, traces):
    shipped, typed = explore.trace_picker(mo, traces)
    eviction, scope = explore.cache_picker(mo)
    ladder = mo.ui.text(value=", ".join(explore.MARGINS), label="Margins", full_width=True)
    mo.vstack(
        [
            mo.hstack([shipped, eviction, scope], justify="start", gap=2, wrap=True),
            mo.hstack([typed, ladder], widths="equal", gap=2, wrap=True),
        ]
    )
    return eviction, ladder, scope, shipped, typed


@app.cell
def _(SimlabError, explore, ladder, mo, shipped, traces, typed):
    trace, problem = None, ""
    margins = []
    try:
        margins = explore.margin_list(ladder.value)
        trace = explore.chosen_trace(traces, shipped.value, typed.value)
    except SimlabError as error:
        problem = str(error)
    mo.stop(trace is None, mo.callout(problem, kind="danger"))
    return margins, trace


@app.cell
def _(explore, mo, trace):
    steps = explore.budget_steps(trace.header)
    budget = mo.ui.slider(
        steps=steps,
        value=min(steps, key=lambda cycles: abs(cycles - 2)),
        label="Budget (token cycles)",
        show_value=True,
        debounce=False,
    )
    get_margin, set_margin = mo.state(0.15)
    return budget, get_margin, set_margin


@app.cell
def _(get_margin, margins, mo, set_margin):
    values = [float(m) for m in margins]
    margin = mo.ui.slider(
        steps=values,
        value=min(values, key=lambda value: abs(value - get_margin())),
        label="Margin L",
        show_value=True,
        on_change=set_margin,
    )
    return (margin,)


@app.cell
def _(budget, margin, mo):
    mo.hstack([budget, margin], justify="start", gap=3, wrap=True)
    return


@app.cell
def _(SimlabError, budget, eviction, explore, margins, mo, scope, trace):
    numbers, refused = [], ""
    with mo.status.spinner("Replaying; the first time a program is compiled for this eviction"):
        try:
            numbers = explore.margin_sweep(trace, budget.value, margins, eviction.value, scope.value)
        except SimlabError as error:
            refused = str(error)
    mo.stop(not numbers, mo.callout(refused, kind="danger"))
    here = explore.at_budget(numbers, budget.value)
    return here, numbers


@app.cell
def _(explore, here, margin, mo, trace):
    chosen = next(n for n in here if abs(n.cell.margin - margin.value) < 1e-9)
    with mo.status.spinner("Replaying slot by slot"):
        changes = explore.changes(trace, chosen.cell)
    return changes, chosen


@app.cell
def _(LIVE_LABEL, REPLAY_LABEL, changes, chosen, explore, here, live, mo):
    def with_interval(rate, scale, digits):
        low, high = (f"{scale * end:.{digits}f}" for end in rate.interval)
        return f"{scale * rate.value:.{digits}f}", f"95 %: {low} to {high}"

    first, priced = here[0].decode, explore.priced([chosen], live)
    miss, miss_interval = with_interval(changes.miss_rate, 100, 1)
    read, read_interval = with_interval(changes.mib_per_token, 1, 3)
    changed, changed_interval = with_interval(changes.substituted, 100, 1)
    tiles = [
        mo.stat(f"{miss} %", "Decode miss rate", f"{miss_interval}; L = 0: {100 - 100 * first.hit_rate:.1f}"),
        mo.stat(read, "MiB read per token", f"{read_interval}; L = 0: {first.read_mib_per_token:.3f}"),
        mo.stat(f"{changed} %", "Slots substituted", changed_interval),
        mo.stat(f"{100 * chosen.decode.mass_displaced:.2f} %", "Router mass displaced", REPLAY_LABEL),
    ]
    if priced and "ppl_ratio" in priced[0].live.intervals:
        ppl = priced[0].live
        more, low, high = (100 * (ratio - 1) for ratio in (ppl.ppl_ratio, *ppl.intervals["ppl_ratio"]))
        tiles.append(
            mo.stat(
                f"{more:+.1f} %", "Perplexity against L = 0", f"{LIVE_LABEL}, 95 %: {low:+.1f} to {high:+.1f}"
            )
        )
    if mo.app_meta().mode == "script":
        print(f"L = {chosen.cell.margin:g}: decode miss rate {miss} % ({REPLAY_LABEL}; {miss_interval})")
    mo.hstack(tiles, justify="start", gap=0, wrap=True)
    return


@app.cell
def _(margin, margin_chart, mo, numbers, set_margin, in_notebook):
    def picked(_):
        found = miss_rates.selections.get("picked", {}).get("margin")
        if found:
            set_margin(found[0])

    miss_rates = mo.ui.altair_chart(
        in_notebook(margin_chart(numbers, chosen=margin.value, pick="picked")),
        chart_selection=False,
        legend_selection=False,
        on_change=picked,
    )
    return (miss_rates,)


@app.cell
def _(chosen, miss_rates, mo, numbers, in_notebook, tradeoff_chart):
    mo.hstack(
        [miss_rates, in_notebook(tradeoff_chart(numbers, [chosen], "the chosen margin"))],
        justify="start",
        gap=2,
        wrap=True,
    )
    return


@app.cell
def _(mo):
    mo.md("""
    ## What this margin changes

    Left: the share of slots whose expert is another than the router's own, by layer and along the decode. Right:
    the experts that this brings in and leaves out.
    """)
    return


@app.cell
def _(changes, chosen, expert_chart, grid_chart, mo, in_notebook):
    mo.stop(not changes.experts.height, mo.md(f"L = {chosen.cell.margin:g} changes nothing."))
    where = grid_chart(
        changes.grid, "changed_percent", "Where and when the routing changed", "Slots changed (%)"
    )
    mo.hstack(
        [in_notebook(where), in_notebook(expert_chart(changes.experts))], justify="start", gap=2, wrap=True
    )
    return


@app.cell
def _(mo):
    mo.md("""
    ## What it costs

    Mass displaced is what a replay can tell. Perplexity is known where a live run of the same cell measured it: for
    `original.trace` at two token cycles, LRU, these came with it; for your own, give the file that
    `simlab validate T.trace MODEL --budget B --margin 0,.1,.15 --json > F.json`, or `simlab ppl`, wrote.
    """)
    return


@app.cell
def _(mo):
    measured = mo.ui.text(
        placeholder="/path/to/validate.json", label="Measured perplexities", full_width=True
    )
    measured
    return (measured,)


@app.cell
def _(Path, SimlabError, explore, measured, mo, trace):
    own = measured.value.strip()
    path = Path(own).expanduser() if own else trace.path.with_suffix(".validate.json")
    live, unread = [], ""
    try:
        live = explore.measured_cells(path) if own or path.is_file() else []
    except SimlabError as error:
        unread = str(error)
    mo.callout(unread, kind="danger") if unread else None
    return (live,)


@app.cell
def _(explore, here, live, margin, mo, price_chart, in_notebook):
    costs = explore.priced(here, live)
    mo.stop(not costs, mo.md("No live run of these cells is known."))
    in_notebook(price_chart(costs, chosen=margin.value))
    return


if __name__ == "__main__":
    app.run()
