"""One HTML page that needs nothing but a browser: tables, figures and examples, no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from grpo_lit.evaluation import plots
from grpo_lit.evaluation.store import Record
from grpo_lit.evaluation.summary import Summary

_STYLE = """
:root { --ink: #1c2330; --soft: #667085; --line: #e4e7ec; --good: #047857; --bad: #b42318; }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink); background: #fff;
  max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.7rem; margin: 0 0 .2rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
p.lead, figcaption, .note { color: var(--soft) } .note, figcaption { font-size: .85rem }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0 }
.card { border: 1px solid var(--line); border-radius: 10px; padding: .7rem 1rem; min-width: 190px }
.card b { display: block; font-size: 1.5rem } .card span { color: var(--soft); font-size: .85rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .85rem }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600 } td.num { font-variant-numeric: tabular-nums }
figure { margin: 1rem 0 } figure svg { max-width: 100%; height: auto }
.pair { display: flex; flex-wrap: wrap; gap: 1rem }
details { border: 1px solid var(--line); border-radius: 8px; margin: .4rem 0; padding: .4rem .8rem }
summary { cursor: pointer } pre { white-space: pre-wrap; background: #f8f9fb; padding: .6rem; border-radius: 6px;
  font-size: .82rem; max-height: 22rem; overflow: auto; margin: .3rem 0 .8rem }
.right { color: var(--good) } .wrong { color: var(--bad) } .tag { font-size: .8rem; color: var(--soft) }
"""


def html_report(summary: Summary, run_config: Record, examples: Sequence[Record], notes: str) -> str:
    """The page.

    Args:
        summary: all tables.
        run_config: what ``run_config.json`` holds.
        examples: problems with answers, from `grpo_lit.evaluation.report.example_rows`.
        notes: how the numbers are computed.
    """
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Evaluation</title>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Evaluation</h1><p class=lead>{escape(_lead(summary, run_config))}</p>",
        _cards(summary),
        f"<h2>Accuracy</h2><figure>{plots.accuracy_figure(summary)}</figure>",
        *_pairs(summary),
        *_datasets(summary),
        "<h2>All scores</h2>",
        *_scores(summary),
        f"<p class=note>In brackets the {summary.confidence:.0%} interval. {escape(notes)}</p>",
        *_examples(examples),
        *_setup(run_config),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _lead(summary: Summary, run_config: Record) -> str:
    models, datasets = len(run_config["models"]), len(run_config["datasets"])
    completions = sum(len(cell.lengths) for cell in summary.cells)
    device = run_config["versions"]["device"]
    return (
        f"{models} model{'s' * (models != 1)}, {datasets} dataset{'s' * (datasets != 1)}, {completions:,} answers; "
        f"{device}, started {run_config['started']}"
    )


def _cards(summary: Summary) -> str:
    cards = [
        f"<div class=card><span>{escape(model)}, {escape(protocol)}</span><b>{interval.value:.3f}</b>"
        f"<span>[{interval.low:.3f}, {interval.high:.3f}] mean over datasets</span></div>"
        for (model, protocol), interval in summary.averages.items()
    ]
    return f"<div class=cards>{''.join(cards)}</div>"


def _pairs(summary: Summary) -> list[str]:
    from grpo_lit.evaluation.report import PAIR_HEADER, pair_row

    figure = plots.paired_figure(summary.comparisons, summary.confidence)
    if figure is None:
        return []
    rows = [pair_row(pair) for pair in summary.comparisons]
    return ["<h2>Pairs of models</h2>", f"<figure>{figure}</figure>", _table(PAIR_HEADER, rows)]


def _datasets(summary: Summary) -> list[str]:
    parts: list[str] = []
    for dataset in dict.fromkeys(cell.dataset for cell in summary.cells):
        own = [cell for cell in summary.cells if cell.dataset == dataset]
        sampled = [cell for cell in own if cell.samples > 1] or own
        figures = [plots.curve_figure(own), plots.length_figure(sampled)]
        captions = ["pass@k and maj@k; the band is the interval of pass@k", "completion lengths"]
        shown = [
            f"<figure>{figure}<figcaption>{caption}</figcaption></figure>"
            for figure, caption in zip(figures, captions, strict=True)
            if figure is not None
        ]
        parts += [f"<h2>{escape(dataset)}</h2>", f"<div class=pair>{''.join(shown)}</div>"]
    return parts


def _scores(summary: Summary) -> list[str]:
    """A table per protocol, so that neither has empty columns."""
    from grpo_lit.evaluation.report import cell_row, metric_names

    parts = []
    for protocol in dict.fromkeys(cell.protocol for cell in summary.cells):
        own = [cell for cell in summary.cells if cell.protocol == protocol]
        names = metric_names(own)
        header = ["model", "dataset", "protocol", "problems", "samples", *names, "tokens/s"]
        parts.append(_table(header, [cell_row(cell, names) for cell in own]))
    return parts


def _examples(examples: Sequence[Record]) -> list[str]:
    parts = ["<h2>Examples</h2><p class=note>First answers; problems on which the models differ come first.</p>"]
    for item in examples:
        marks = " ".join(
            f"<span class={'right' if a['correct'] else 'wrong'}>{escape(a['model'])} {'✗✓'[a['correct']]}</span>"
            for a in item["answers"]
        )
        question = " ".join(item["question"].split())
        short = question if len(question) <= 90 else question[:90] + "…"
        where = f"{item['dataset']} {item['protocol']} #{item['example']}"
        body = [f"<pre>{escape(item['question'])}</pre><p>gold answer: <b>{escape(str(item['gold']))}</b></p>"]
        for a in item["answers"]:
            extracted = "none" if a["extracted"] is None else a["extracted"]
            body.append(
                f"<p class={'right' if a['correct'] else 'wrong'}>{escape(a['model'])}: {escape(a['kind'])}, "
                f"answer {escape(extracted)}, {a['num_tokens']} tokens{', cut' * a['truncated']}</p>"
                f"<pre>{escape(a['completion'])}</pre>"
            )
        parts.append(
            f"<details><summary>{escape(short)} <span class=tag>{escape(where)}</span> {marks}</summary>"
            f"{''.join(body)}</details>"
        )
    return parts


def _setup(run_config: Record) -> list[str]:
    from grpo_lit.evaluation.report import dataset_row, model_row

    return [
        "<h2>Models, datasets, versions</h2>",
        _table(["model", "base", "weights", "format"], [model_row(*item) for item in run_config["models"].items()]),
        _table(
            ["dataset", "source", "problems", "may select"], [dataset_row(*i) for i in run_config["datasets"].items()]
        ),
        _table(list(run_config["versions"]), [list(run_config["versions"].values())]),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td class=num>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
