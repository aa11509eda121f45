"""Tables and figures of the scaling model, from the JSON of `scaling.py measure`; measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaling import constants, model
from tools import figures, harness, testbed
from tools.tables import describe_header

RANKS = tuple(2**k for k in range(1, 13))
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9)
RATES = ("1gbit", "10gbit", "25gbit", "100gbit")
PARAMETERS = (1_000, 100_000)
PAYS = 0.01  # a step shorter by more than this share counts as paying
TITLES = {"all_reduce_bor": "OR by ring all-reduce", "all_gather": "one all_gather", "grid": "grid of all_gathers"}
EFFICIENCY = 1448 / 1514  # of a rate, where the fit's link has none


class Predictions:
    """The model with the constants of one JSON."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.link, self.exchanges, steps = constants.read(results)
        # The fewest ranks measured: on the testbed the others share cores, which ranks of their own do not.
        self.step_ranks = min(steps)
        self.step = steps[self.step_ranks]
        self.mask_bytes = model.mask_bytes(results["fit"]["parameters"])
        rate = testbed.Rate.parse(results["fit"]["header"]["links"][0]).bits_per_second
        self.efficiency = min(1.0, self.link.bytes_per_second * 8 / rate) if rate else EFFICIENCY

    def at(self, rate: str) -> model.Link:
        bits = testbed.Rate.parse(rate).bits_per_second
        assert bits is not None
        return model.at_rate(self.link, bits / 8, self.efficiency)

    def exchange(self, method: str, ranks: int, rate: str, mask_bytes: int | None = None) -> float:
        return model.exchange_seconds(method, ranks, mask_bytes or self.mask_bytes, self.exchanges, self.at(rate))

    def predict(self, scheme: str, ranks: int, fraction: float, rate: str, method: str) -> model.Prediction:
        exchange = self.exchange(method, ranks, rate)
        return model.predict(scheme, ranks, fraction, self.step, self.at(rate), exchange)

    def ratio(self, scheme: str, ranks: int, fraction: float, rate: str, method: str = "grid") -> float:
        plain = self.predict("plain", ranks, fraction, rate, method).step_seconds
        return self.predict(scheme, ranks, fraction, rate, method).step_seconds / plain

    def pays(self, ranks: int, rate: str, method: str) -> float | None:
        exchange = self.exchange(method, ranks, rate)
        return model.smallest_that_pays(ranks, self.step, self.at(rate), exchange, PAYS)

    @property
    def until_first_bucket(self) -> float:
        """What hides an exchange: backward until the first bucket is ready."""
        return self.step.ready[1][1]

    def last_hidden(self, method: str, rate: str) -> int | None:
        """The largest power of two of ranks at which backward hides the whole exchange."""
        hidden = [n for n in RANKS if self.exchange(method, n, rate) <= self.until_first_bucket]
        return max(hidden, default=None)


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---:|" * len(headings)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _ms(seconds: float) -> str:
    return f"{float(f'{seconds * 1e3:.3g}'):,g}"


def _percent(fraction: float | None) -> str:
    return "never" if fraction is None else f"{fraction:.1%}"


def _constants(p: Predictions) -> list[str]:
    step = p.step
    rows = [
        ("link, a hop", f"{_ms(p.link.hop_seconds)} ms"),
        ("link, of its rate", f"{p.efficiency:.3f}"),
        *((f"{TITLES[m]}, a call", f"{_ms(e.call_seconds)} ms") for m, e in p.exchanges.items()),
        *((f"{TITLES[m]}, a hop", f"{_ms(e.hop_seconds)} ms") for m, e in p.exchanges.items()),
        ("gradients", f"{step.dense_bytes / 1e6:.1f} MB in {len(step.bucket_bytes)} buckets"),
        ("mask message", f"{p.mask_bytes} bytes"),
        ("forward", f"{_ms(step.forward_seconds)} ms"),
        ("backward, all gradients", f"{_ms(step.ready[-1][1])} ms"),
        ("backward, until the first bucket", f"{_ms(p.until_first_bucket)} ms"),
        ("copying back", f"{_ms(step.finish_seconds_per_byte * step.dense_bytes)} ms for all gradients"),
        ("zero-filling", f"{_ms(step.unused_seconds_per_byte * step.dense_bytes)} ms for all gradients"),
        ("hook", f"{_ms(step.hook_seconds)} ms and {_ms(step.hook_seconds_per_byte * 1e8)} ms for 100 MB"),
    ]
    return [f"## Constants ({p.step_ranks} ranks)", "", *_markdown(("What", "Measured"), rows)]


def _validation(p: Predictions) -> list[str]:
    rows = []
    for row in p.results["rows"]:
        if row["what"] != "step":
            continue
        measured, ratio = row["measured_seconds"], row["measured_ratio_to_plain"]
        rows.append(
            (
                str(row["world_size"]),
                f"{row['fraction_unused']:.0%}",
                row["scheme"],
                row["source"],
                f"{_ms(measured['median'])} ({_ms(measured['q1'])} to {_ms(measured['q3'])})",
                _ms(row["predicted_seconds"]),
                f"{row['predicted_over_measured'] - 1:+.1%}",
                f"{ratio['median']:.3f}",
                f"{row['predicted_ratio_to_plain']:.3f}",
            )
        )
    headings = ("Ranks", "Unused", "Scheme", "From", "Measured, ms", "Model, ms", "Residual", "/ DDP", "/ DDP, model")
    parts = ["## The model against steps it was not fitted to", "", *_markdown(headings, rows)]
    for row in (row for row in p.results["rows"] if row["what"] != "step"):
        parts.append(
            f"- {row['world_size']} ranks, {row['what']}: measured {_ms(row['measured_seconds'])} ms, model "
            f"{_ms(row['predicted_seconds'])} ms ({row['predicted_over_measured'] - 1:+.0%})."
        )
    return [*parts, "", p.results["sentence"], ""]


def _exchange_table(p: Predictions, rate: str) -> list[str]:
    rows = []
    gather = p.exchanges["all_gather"]
    for ranks in RANKS:
        grid = model.best_grid(ranks, model.mask_bytes(PARAMETERS[-1]), gather, p.at(rate))
        cells = [f"{ranks:,}", "x".join(map(str, grid))]
        for parameters in PARAMETERS:
            cells += [_ms(p.exchange(m, ranks, rate, model.mask_bytes(parameters))) for m in model.EXCHANGES]
        rows.append(cells)
    headings = ["Ranks", f"Grid for {PARAMETERS[-1]:,}"]
    headings += [f"{TITLES[m]}, {parameters:,}, ms" for parameters in PARAMETERS for m in model.EXCHANGES]
    parts = [f"## What agreeing takes, by ranks and parameters ({rate})", "", *_markdown(headings, rows)]
    for method in model.EXCHANGES:
        last = p.last_hidden(method, rate)
        where = f"up to {last:,} ranks" if last else "on no number of ranks"
        parts.append(f"- Backward's first {_ms(p.until_first_bucket)} ms hide {TITLES[method]} {where}.")
    return [*parts, ""]


def _rate_tables(p: Predictions, rate: str) -> list[str]:
    rows = []
    for ranks in RANKS:
        plain = p.predict("plain", ranks, 0.0, rate, "grid").step_seconds
        ratios = [f"{p.ratio('ours', ranks, f, rate):.3f} ({p.ratio('oracle', ranks, f, rate):.3f})" for f in FRACTIONS]
        pays = [_percent(p.pays(ranks, rate, method)) for method in model.EXCHANGES]
        rows.append([f"{ranks:,}", _ms(plain), *ratios, *pays])
    headings = ["Ranks", "DDP, ms", *(f"{f:.0%} unused" for f in FRACTIONS)]
    headings += [f"pays from, {TITLES[method]}" for method in model.EXCHANGES]
    return [f"## {rate}", "", *_markdown(headings, rows), sentence(p, rate), ""]


def sentence(p: Predictions, rate: str) -> str:
    """What one rate's table shows, losses included."""
    few, many = RANKS[0], RANKS[-1]
    costs = [p.ratio("ours", n, 0.0, rate) - 1 for n in RANKS]
    parts = []
    for method in model.EXCHANGES:
        ends = [f"{_percent(p.pays(n, rate, method))} on {n:,}" for n in (few, 256, many)]
        parts.append(f"{TITLES[method]}: {', '.join(ends)}")
    worst = RANKS[costs.index(max(costs))]
    return (
        f"At {rate} skipping takes more than {PAYS:.0%} off a step from this fraction unused on: {'; '.join(parts)} "
        f"ranks. With nothing to skip the step is {max(costs):.1%} longer at worst (grid, {worst:,} "
        f"ranks); with 75% unused it takes {p.ratio('ours', few, 0.75, rate):.2f} of plain DDP's on {few} ranks and "
        f"{p.ratio('ours', many, 0.75, rate):.2f} on {many:,}."
    )


def _traffic(p: Predictions) -> list[str]:
    rows = []
    rate = RATES[0]
    for ranks in RANKS:
        cells = [f"{ranks:,}"]
        for scheme, fraction in (("plain", 0.0), ("ours", 0.5), ("ours", 0.75), ("ours", 0.9)):
            cells.append(f"{p.predict(scheme, ranks, fraction, rate, 'grid').wire_bytes / 1e6:.1f}")
        for method in model.EXCHANGES:
            sent = model.exchange_wire_bytes(method, ranks, p.mask_bytes, p.exchanges, p.at(rate))
            cells.append(f"{sent / 1e3:.2f}")
        rows.append(cells)
    headings = ["Ranks", "DDP, MB", "50% unused, MB", "75%, MB", "90%, MB"]
    headings += [f"{TITLES[m]}, kB" for m in model.EXCHANGES]
    text = "What a rank sends in a step: gradients, and what agreeing adds to it. The oracle sends what ddp_hooks does."
    return ["## Traffic", "", text, "", *_markdown(headings, rows)]


def tables(p: Predictions) -> str:
    parts = [
        "# Scaling",
        "",
        f"Made by `python benchmarks/scaling.py predict` from results/{p.results['benchmark']}.json. Everything but",
        "the first two sections is extrapolated by the model of [scaling.md](../../docs/internals/scaling.md), which",
        "says what it leaves out. Ratios are to plain DDP's step; in brackets the oracle's. ddp_hooks agrees by the",
        "grid.",
        "",
        describe_header(p.results["fit"]["header"]),
        "",
        *_constants(p),
        *_validation(p),
        *_exchange_table(p, RATES[0]),
    ]
    for rate in RATES:
        parts += _rate_tables(p, rate)
    parts += _traffic(p)
    return "\n".join(parts)


def draw_steps(p: Predictions, path: Path) -> None:
    """ddp_hooks and the oracle against plain DDP over the world size, one panel for each rate."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, len(RATES), figsize=(3.1 * len(RATES), 3.2), squeeze=False, sharey=True)
    shades = ("#1b263b", "#0b6e4f", "#e09f3e", "#c1440e", "#8d99ae")
    for axis, rate in zip(axes[0], RATES, strict=True):
        for fraction, colour in zip(FRACTIONS, shades, strict=True):
            ours = [p.ratio("ours", n, fraction, rate) for n in RANKS]
            oracle = [p.ratio("oracle", n, fraction, rate) for n in RANKS]
            axis.plot(RANKS, ours, color=colour, marker="o", ms=2.5, label=f"ddp_hooks, {fraction:.0%} unused")
            axis.plot(RANKS, oracle, color=colour, ls="--", lw=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(rate, loc="left")
        axis.set_xlabel("ranks")
        axis.set_ylim(0, None)
    axes[0][0].set_ylabel("step, of plain DDP's (dashed: oracle)")
    figures.put_legend_below(figure, axes[0][0])
    figures.save(figure, path)
    plt.close(figure)


def draw_exchange(p: Predictions, path: Path) -> None:
    """What agreeing takes over the world size, and what backward hides of it."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, len(PARAMETERS), figsize=(4.2 * len(PARAMETERS), 3.2), squeeze=False, sharey=True)
    colours = {"all_reduce_bor": "#c1440e", "all_gather": "#e09f3e", "grid": "#0b6e4f"}
    for axis, parameters in zip(axes[0], PARAMETERS, strict=True):
        for method, colour in colours.items():
            times = [1e3 * p.exchange(method, n, RATES[0], model.mask_bytes(parameters)) for n in RANKS]
            axis.plot(RANKS, times, color=colour, marker="o", ms=2.5, label=TITLES[method])
        axis.axhline(1e3 * p.until_first_bucket, color="#577590", ls=":", label="backward until the first bucket")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{parameters:,} parameters, {RATES[0]}", loc="left")
        axis.set_xlabel("ranks")
    axes[0][0].set_ylabel("ms, not hidden")
    figures.put_legend_below(figure, axes[0][0])
    figures.save(figure, path)
    plt.close(figure)


def write(name: str, results: Path | None = None, out: Path | None = None) -> int:
    """Write SCALING.md and the figures from one JSON; print what each rate's table shows."""
    source = (results or harness.RESULTS) / f"{name}.json"
    folder = out or harness.FIGURES
    if not source.exists():
        print(f"no {source.name}; run scaling.py measure first")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    p = Predictions(json.loads(source.read_text()))
    (folder / "SCALING.md").write_text(tables(p))
    for rate in RATES:
        print(sentence(p, rate))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("tables written; figures need matplotlib (pip install matplotlib)")
        return 0
    draw_steps(p, folder / "scaling_step.svg")
    draw_exchange(p, folder / "scaling_exchange.svg")
    return 0
