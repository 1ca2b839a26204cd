"""The figure of `pagedkv lab`: hit rate against pool size, a line for each policy and one for the optimum."""

import os

from pagedkv.cli import CommandError
from pagedkv.cli.report import check_output_path

LINES = {"lru": "#1f77b4", "lfu": "#ff7f0e", "fifo": "#8c564b", "slru": "#2ca02c", "s3fifo": "#d62728",
         "priority": "#9467bd"}
MARKERS = {"lru": "o", "lfu": "s", "fifo": "v", "slru": "^", "s3fifo": "D", "priority": "x"}


def check_plot(path):
    """Finds out before the work whether the figure can be drawn and written; returns nothing."""
    try:
        import matplotlib
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'pagedkv[plot]'") from None
    check_output_path(path)
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    suffix = os.path.splitext(path)[1][1:].lower()
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if suffix not in formats:
        raise CommandError(f"{path}: a figure's name ends in one of .{', .'.join(formats)}")


def draw(result, path):
    """Writes the figure; equal results give equal files."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "pagedkv", "svg.fonttype": "path", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        sizes = [size * result["block_size"] for size in result["sizes"]]
        rates = [100 * rate for rate in result["optimal"]["hit_rate"]]
        axes.plot(sizes, rates, color="black", linestyle="--", linewidth=1.2, label="optimal")
        for name, curve in result["policies"].items():
            axes.plot(sizes, [100 * rate for rate in curve["hit_rate"]], label=name, color=LINES.get(name),
                      marker=MARKERS.get(name), markersize=4, linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [_short(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("pool size, tokens")
        axes.set_ylabel("prompt tokens found, %")
        axes.set_ylim(bottom=0)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_title(f"{os.path.basename(result['trace'])}, blocks of {result['block_size']} tokens", fontsize=10)
        axes.legend(frameon=False)
        is_svg = path.lower().endswith(".svg")
        figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)


def _short(count):
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
