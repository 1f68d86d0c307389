"""``grpo-lit bench rollout``: the rollout engines side by side on one model shape with random weights.

Every row runs to its last token. A time is that of a whole rollout, prefill and recording of graphs included, over
the tokens a row; the limit is the time that reading the weights once would take at the speed of a copy. On a machine
without CUDA a tiny shape runs; that shows that it works and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from grpo_lit.bench import rollout_cases as cases
from grpo_lit.bench.options import BenchParser
from grpo_lit.bench.rollout_breakdown import breakdown, lines
from grpo_lit.bench.shapes import SHAPES, check_lengths
from grpo_lit.bench.tables import write_csv
from grpo_lit.errors import SystemFault
from grpo_lit.paths import csv_argument, image_argument
from grpo_lit.rollout.model_reader import weight_bytes
from grpo_lit.rollout.stats import copy_bandwidth


def _parser() -> BenchParser:
    parser = BenchParser(prog="grpo-lit bench rollout", description=__doc__.splitlines()[0])
    on_cuda = torch.cuda.is_available()
    parser.option("--shape", default="1.5b" if on_cuda else "tiny", among=list(SHAPES))
    parser.option("--engines", nargs="+", default=cases.installed_engines(), among=cases.installed_engines())
    parser.option("--formats", nargs="+", default=["bf16", "nf4+lora"], among=cases.FORMATS)
    parser.option("--rows", nargs="+", type=int, default=[4, 16, 32, 128] if on_cuda else [3], metavar="R", least=1)
    parser.option("--tokens", nargs="+", type=int, default=[256, 768] if on_cuda else [8], metavar="T", least=1)
    parser.option("--prompt-tokens", type=int, default=128 if on_cuda else 70, least=1)
    parser.option("--samples", type=int, default=3, least=1, help="timed rollouts of each size (default 3)")
    text = "time hf on so many tokens a row at most (it takes minutes)"
    parser.option("--hf-tokens", type=int, least=1, needs="--engines hf", help=text)
    parser.add_argument("--breakdown", action="store_true", help="where a step's time goes, kernel by kernel (CUDA)")
    parser.add_argument("--csv", type=csv_argument, help="write every row with GPU, versions and date to this file")
    parser.add_argument("--plot", type=image_argument, help="write ms per step against rows to this image")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the benchmark.

    Args:
        argv: arguments after ``grpo-lit bench rollout``.
    """
    options = _parser().parse_args(argv)
    check_lengths(options.shape, options.prompt_tokens, max(options.tokens), "--tokens")
    if options.breakdown and not torch.cuda.is_available():
        raise SystemFault("--breakdown reads the times of CUDA kernels; there is no CUDA device")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = _context(device)
    show = (lambda line: None) if options.json else (lambda line: print(line, flush=True))
    show(_headline(context, options.shape))
    rows: list[dict[str, Any]] = []
    with cases.quiet(), tempfile.TemporaryDirectory() as folder:
        for weights in options.formats:
            policy = cases.build_policy(options.shape, weights, Path(folder), device)
            for row in _measure(options, policy, weights, context):
                rows.append(row)
                show(_line(row, first=len(rows) == 1))
            if options.breakdown:
                for count in options.rows:
                    engine = cases.build_engine("graph", policy)
                    sizes = (count, max(options.tokens), options.prompt_tokens, _vocab(policy))
                    show(f"\ngraph, {weights}, {count} rows: one step half-way through {max(options.tokens)} tokens")
                    for line in lines(breakdown(engine, *sizes)):
                        show(line)
                    engine.close()
                    del engine  # it holds the policy
            del policy
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.csv is not None:
        write_csv(options.csv, rows)
    if options.plot is not None:
        _plot(options.plot, rows, context)
    if options.json:
        print(json.dumps({"context": context, "rows": rows}))
    return 0


def _vocab(policy: Any) -> int:
    return int(policy.model.config.vocab_size)


def _measure(
    options: argparse.Namespace, policy: Any, weights: str, context: dict[str, Any]
) -> Iterable[dict[str, Any]]:
    num_bytes = weight_bytes(policy)
    speed = context["copy_tb_per_s"]
    limit = num_bytes / speed / 1e9 if speed else None  # ms
    for name in options.engines:
        engine = cases.build_engine(name, policy)
        for count in options.rows:
            for num_tokens in options.tokens:
                timed = min(num_tokens, options.hf_tokens or num_tokens) if name == "hf" else num_tokens
                got = cases.measure(
                    engine, count, timed, options.prompt_tokens, _vocab(policy), samples=options.samples
                )
                yield {
                    "engine": name,
                    "shape": options.shape,
                    "format": weights,
                    "rows": count,
                    "tokens": num_tokens,
                    "tokens_timed": timed,
                    "prompt_tokens": options.prompt_tokens,
                    "ms_per_step": got.ms_per_step,
                    "tokens_per_s": count / got.ms_per_step * 1e3,
                    "limit_ms": limit,
                    "share_of_limit": limit / got.ms_per_step if limit else None,
                    "base_mib": got.base_mib,
                    "peak_mib": got.peak_mib,
                    "startup_s": got.startup_seconds,
                    **context,
                }
        engine.close()


def _context(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "measurement": on_cuda,
        "copy_tb_per_s": copy_bandwidth(device, 1 << 29) / 1e12 if on_cuda else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _headline(context: dict[str, Any], shape: str) -> str:
    versions = f"torch {context['torch']}, transformers {context['transformers']}"
    if not context["measurement"]:
        return f"NO MEASUREMENT: no CUDA device, shape {shape}; {versions}"
    return f"{context['gpu']}, copy {context['copy_tb_per_s']:.2f} TB/s; {shape}; {versions}; {context['date']}"


def _line(row: dict[str, Any], *, first: bool) -> str:
    title = (
        f"{'engine':7s} {'format':10s} {'rows':>5s} {'tokens':>6s} {'ms/step':>8s} {'tokens/s':>9s} "
        f"{'limit ms':>8s} {'share':>6s} {'base MiB':>9s} {'peak MiB':>9s} {'startup s':>9s}\n"
    )
    limit = f"{row['limit_ms']:8.3f} {row['share_of_limit']:6.1%}" if row["limit_ms"] else f"{'-':>8s} {'-':>6s}"
    mark = "" if row["tokens"] == row["tokens_timed"] else f"  (timed on {row['tokens_timed']} tokens)"
    return (title if first else "") + (
        f"{row['engine']:7s} {row['format']:10s} {row['rows']:5d} {row['tokens']:6d} {row['ms_per_step']:8.3f} "
        f"{row['tokens_per_s']:9.0f} {limit} {row['base_mib']:9.0f} {row['peak_mib']:9.0f} "
        f"{row['startup_s']:9.2f}{mark}"
    )


def _plot(path: Path, rows: list[dict[str, Any]], context: dict[str, Any]) -> None:
    """ms per step against rows in flight, a line for each engine, format and length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    colours = {weights: f"C{index}" for index, weights in enumerate(dict.fromkeys(row["format"] for row in rows))}
    styles = {"graph": "-", "hf": "--"}
    for engine, weights, tokens in dict.fromkeys((row["engine"], row["format"], row["tokens"]) for row in rows):
        points = [r for r in rows if (r["engine"], r["format"], r["tokens"]) == (engine, weights, tokens)]
        axes.plot(
            [row["rows"] for row in points],
            [row["ms_per_step"] for row in points],
            marker="o" if tokens == max(row["tokens"] for row in rows) else ".",
            linestyle=styles.get(engine, ":"),
            color=colours[weights],
            label=f"{engine} {weights}, {tokens} tokens",
        )
    for weights, colour in colours.items():
        limit = next(row["limit_ms"] for row in rows if row["format"] == weights)
        if limit:
            axes.axhline(limit, color=colour, linewidth=0.8, linestyle=":", label=f"reading the {weights} weights")
    axes.set(xlabel="rows in flight", ylabel="ms per decode step", xscale="log", yscale="log")
    axes.legend(fontsize=6)
    note = f"{context['gpu']}, {context['date']}" if context["measurement"] else "no measurement"
    figure.text(0.99, 0.01, note, ha="right", fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
