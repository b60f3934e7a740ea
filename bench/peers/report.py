"""The table and the plot of a run's records: medians over the rounds."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
OURS = "vllm_lite"
BUSY = 0.05  # a foreign CPU share above this is pointed out


class Results:
    """``median(engine, workload, field)``; a dotted field reaches into a dictionary."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.records: list[Record] = result["records"]
        self.workloads: dict[str, str] = result["workloads"]
        self.engines: list[str] = result["engines"]

    def values(self, engine: str | None, workload: str | None, field: str) -> list[float]:
        """``None``: all of them."""
        values = []
        for record in self.records:
            if engine in (None, record["engine"]) and workload in (None, record["workload"]):
                value: Any = record
                for key in field.split("."):
                    value = value.get(key) if isinstance(value, dict) else None
                if value is not None:
                    values.append(float(value))
        return values

    def median(self, engine: str | None, workload: str | None, field: str) -> float | None:
        values = self.values(engine, workload, field)
        return statistics.median(values) if values else None

    def best_peer(self, workload: str, field: str) -> tuple[str, float] | None:
        """The fastest that is not ours."""
        found = [
            (engine, value)
            for engine in self.engines
            if not engine.startswith(OURS)
            and (value := self.median(engine, workload, field)) is not None
        ]
        return max(found, key=lambda pair: pair[1]) if found else None

    def roof(self, engine: str, workload: str) -> float | None:
        """Share of the read bandwidth that reading the weights for every token takes."""
        shares = [
            record["output_tokens_per_s"] * record["weight_bytes"]
            / (record["read_bandwidth_gb_s"] * 1e9)
            for record in self.records
            if (record["engine"], record["workload"]) == (engine, workload)
            and "output_tokens_per_s" in record
        ]  # fmt: skip
        return statistics.median(shares) if shares else None


def write_report(result: dict[str, Any], path: Path) -> None:
    """``<path>`` with .md and .png in place of .json."""
    results = Results(result)
    path.with_suffix(".md").write_text(_markdown(result, results))
    _plot(results, path.with_suffix(".png"))


def _markdown(result: dict[str, Any], results: Results) -> str:
    machine = result["machine"]
    offline = [name for name in results.workloads if not name.startswith("W3")]
    serving = [name for name in results.workloads if name.startswith("W3")]
    bandwidths = results.values(None, None, "read_bandwidth_gb_s") or [float("nan")]
    foreign = results.values(None, None, "foreign_cpu_share") or [float("nan")]
    lines = [
        f"# vllm_lite and its peers on a CPU, {result['date']}",
        "",
        *(["**Smoke run: the sizes are tiny and the figures say nothing.**", ""]
          if result["smoke"] else []),
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']} GB. "
        f"`bench/peers/run.sh`; medians of {_runs(results)} each, engines in turn.",
        f"Read bandwidth, measured before each start: {min(bandwidths):.1f} to "
        f"{max(bandwidths):.1f} GB/s, median {statistics.median(bandwidths):.1f}.",
        f"CPU used by other processes: median {statistics.median(foreign):.0%}, most "
        f"{max(foreign):.0%}." + (" **Runs above 5 % are doubtful.**" if max(foreign) > BUSY
                                  else ""),
        "",
        *(f"- {name}: {title}" for name, title in results.workloads.items()),
        "",
    ]  # fmt: skip
    if offline:
        lines += ["## Output tokens/s", "", *_throughput(results, offline), ""]
    singles = [name for name in ("W2", "W5 single") if name in offline]
    if singles:
        lines += ["## Single stream: share of the read bandwidth", "", *_roofs(results, singles)]
        lines += ["", "Tokens/s times the weights' bytes over the read bandwidth of the run.", ""]
    if serving:
        lines += ["## Streaming over HTTP, milliseconds", "", *_serving(results, serving), ""]
    lines += ["## Start and memory", "", *_start(results), ""]
    missing = _missing(results)
    if missing:
        lines += ["## Not measured", "", *missing, ""]
    return "\n".join(lines)


def _runs(results: Results) -> str:
    """How many a figure is the median of; fewer where rounds left an engine or workload out."""
    counts = {
        len(results.values(engine, workload, "round"))
        for engine in results.engines
        for workload in results.workloads
    } - {0}
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{low} to {high} runs" if low < high else f"{high} run(s)"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _by_engine(
    results: Results, workloads: list[str], cell: Callable[[str, str], str]
) -> list[list[str]]:
    return [
        [engine, *(cell(engine, workload) for workload in workloads)] for engine in results.engines
    ]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _throughput(results: Results, workloads: list[str]) -> list[str]:
    field = "output_tokens_per_s"
    rows = _by_engine(
        results, workloads, lambda e, w: _number(results.median(e, w, field))
    )  # fmt: skip
    ratios = [f"{OURS} / best peer"]
    for workload in workloads:
        ours, best = results.median(OURS, workload, field), results.best_peer(workload, field)
        known = ours is not None and best is not None
        ratios.append(f"{ours / best[1]:.2f} ({best[0]})" if known else "-")  # type: ignore
    return _table(["engine", *workloads], [*rows, ratios])


def _roofs(results: Results, workloads: list[str]) -> list[str]:
    def cell(engine: str, workload: str) -> str:
        share = results.roof(engine, workload)
        return "-" if share is None else f"{share:.0%}"

    return _table(["engine", *workloads], _by_engine(results, workloads, cell))


def _serving(results: Results, workloads: list[str]) -> list[str]:
    fields = ("ttft_ms.p50", "ttft_ms.p99", "itl_ms.p50", "itl_ms.p99", "output_tokens_per_s")
    rows = []
    for workload in workloads:
        for engine in results.engines:
            figures = [results.median(engine, workload, field) for field in fields]
            if any(figure is not None for figure in figures):
                rows.append([workload, engine, *map(_number, figures)])
    head = ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "tokens/s"]
    return _table(["rate", "engine", *head], rows)


def _start(results: Results) -> list[str]:
    """From the first model's workloads: of SmolLM2, unless only others ran."""
    rows = []
    for engine in results.engines:
        row = [engine]
        for workloads in (("W1", "W2", "W4"), ("W5 offline", "W5 single")):
            for field, digits in (("ready_s", 1), ("resident_mb", 0)):
                values = [v for w in workloads for v in results.values(engine, w, field)]
                row.append(_number(statistics.median(values) if values else None, digits))
        foreign = results.values(engine, None, "foreign_cpu_share")
        row.append(f"{max(foreign):.0%}" if foreign else "-")
        rows.append(row)
    head = ["SmolLM2 ready s", "resident MB", "1.1B ready s", "resident MB", "most foreign CPU"]
    return _table(["engine", *head], rows)


def _missing(results: Results) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for record in results.records:
        if "error" in record:
            names = by_reason.setdefault((record["engine"], record["error"]), [])
            if record["workload"] not in names:
                names.append(record["workload"])
    return [
        f"- {engine}, {', '.join(names)}: {reason}" for (engine, reason), names in by_reason.items()
    ]


def _plot(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (name, "output_tokens_per_s", f"{name}: output tokens/s")
        for name in results.workloads
        if not name.startswith("W3")
    ]
    busiest = max((name for name in results.workloads if name.startswith("W3")), default=None)
    if busiest is not None:
        panels.append((busiest, "ttft_ms.p50", f"{busiest}: TTFT p50, ms (less is better)"))
        panels.append((busiest, "itl_ms.p50", f"{busiest}: ITL p50, ms (less is better)"))
    panels.append((next(iter(results.workloads)), "ready_s", "ready, s (less is better)"))
    columns = 2
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 0.6 + 2.2 * rows), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (workload, field, title) in zip(axes.flat, panels, strict=False):
        values = [results.median(engine, workload, field) for engine in results.engines]
        colours = ["tab:blue" if e.startswith(OURS) else "tab:gray" for e in results.engines]
        bars = axis.barh(results.engines, [value or 0 for value in values], color=colours)
        labels = ["not measured" if value is None else f"{value:,.1f}" for value in values]
        axis.bar_label(bars, labels, padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
