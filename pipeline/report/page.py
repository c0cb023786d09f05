"""The report as one HTML file that needs nothing else: pictures lie in it, once for a light and once for a dark page."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pipeline.report import figures
from pipeline.report.runs import Estimate, Row, Run, TargetSpeed, effects, leaderboard
from pipeline.report.style import STYLE
from pipeline.runtime.files import atomic_file

SHORT = 30
"""Letters of a value that stay in one line."""


@dataclass(frozen=True)
class Report:
    """What the page shows. `facts` are (name, value) of its head; `saved` and `commands` rows of (what, value, how it was found) and
    (what it does, command)."""

    title: str
    monitor: str
    mode: str
    runs: Sequence[Run]
    facts: Sequence[tuple[str, str]]
    saved: Sequence[tuple[str, str, str]]
    commands: Sequence[tuple[str, str]]
    target: TargetSpeed | None


def write_report(report: Report, folder: Path) -> Path:
    """`report.html` and its pictures as PNG files in `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = leaderboard(report.runs, report.mode, report.target)
    others = [run for run in report.runs if not run.ended]
    found = effects(report.runs)
    pictures: dict[str, tuple[figures.Draw, tuple[float, float]]] = {}
    if any(run.records for run in report.runs):
        pictures["curves"] = (figures.curves(rows, others, report.monitor), (10.4, 3.6))
    if rows:
        panels = 1 + any(row.draft_seconds is not None for row in rows) + any(row.speedup is not None for row in rows)
        pictures["pareto"] = (figures.pareto(rows, report.monitor, report.mode), (max(5.2, 3.47 * panels), 3.6))
    if any(row.accuracy_by_slot for row in rows):
        pictures["slots"] = (figures.slots(rows), (5.2, 3.4))
    if found:
        down, across = figures.settings_grid(found)
        pictures["settings"] = (figures.settings_effects(found, report.monitor), (min(10.4, 2.6 * across + 0.6), 3.2 * down))
    for name, (draw, size) in pictures.items():
        figures.png(draw, size, folder / f"{name}.png")
    images = {name: _picture(name, draw, size) for name, (draw, size) in pictures.items()}
    page = folder / "report.html"
    with atomic_file(page) as stream:
        stream.write(_page(report, rows, images).encode())
    return page


def _page(report: Report, rows: Sequence[Row], images: Mapping[str, str]) -> str:
    explained = {
        "curves": "The metric at every validation and the loss in training, one line a seed. Numbers are ranks; settings beyond the sixth, "
        "and runs that did not come to their end, are grey.",
        "pareto": "The line joins the settings that no other beats in both directions. "
        + (f"Target: {report.target.how}. " if report.target else "")
        + "Speed-up = val_walk_accept_len × target's step ÷ (draft's block + target's verification).",
        "slots": "How often slot k of a block is right, whatever came before it.",
        "settings": "Mean over all runs that have a value, with its 95 % interval; the share is of the variance over runs (η²), one field "
        "at a time, and of a range that of its lower, middle and upper third of values.",
    }
    titles = {"curves": "Curves", "pareto": "Acceptance against cost", "slots": "Accuracy by slot", "settings": "What the settings do"}
    order = ("pareto", "settings", "curves", "slots")
    shown = [f"<h2>{titles[name]}</h2><p class=note>{explained[name]}</p>{images[name]}" for name in order if name in images]
    parts = [
        f"<header><h1>{escape(report.title)}</h1><p class=note>{_subtitle(report)}</p>{_tiles(report, rows)}</header>",
        f"<h2>Leaderboard</h2>{_leaderboard(report, rows)}",
        *shown,
        f"<h2>What one read saved</h2>{_saved(report.saved)}" if report.saved else "",
        f"<h2>To do it again</h2>{_commands(report.commands)}" if report.commands else "",
        f"<h2>All runs</h2>{_all_runs(report)}",
        f"<h2>Of this sweep</h2>{_table(('', ''), [[_text(name), _code(value)] for name, value in report.facts], titled=False)}",
    ]
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<meta name=color-scheme content='light dark'><title>{escape(report.title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _subtitle(report: Report) -> str:
    settings, seeds = len({repr(run.settings) for run in report.runs}), len({run.seed for run in report.runs})
    swept = ", ".join(name.rpartition(".")[2] for name in (report.runs[0].settings if report.runs else ()))
    return _text(f"{settings} setting(s) of {swept or 'nothing'}, {seeds} seed(s), compared by {report.monitor}")


def _tiles(report: Report, rows: Sequence[Row]) -> str:
    counts: dict[str, int] = {}
    for run in report.runs:
        counts[run.state.lower()] = counts.get(run.state.lower(), 0) + 1
    tiles = [("runs", f"{len(report.runs)}", ", ".join(f"{count} {state}" for state, count in counts.items()))]
    if rows:
        best = rows[0]
        tiles.insert(0, (f"best {report.monitor}", f"{best.value.mean:.3f}", _settings(best.settings)))
        fastest = max((row for row in rows if row.speedup is not None), key=lambda row: row.speedup or 0, default=None)
        if fastest is not None:
            tiles.insert(1, ("best predicted speed-up", f"{fastest.speedup:.2f}×", f"rank {rows.index(fastest) + 1}"))
    tiles += [(what, value, how) for what, value, how in report.saved if what == "bytes read"]
    shown = (f"<div><b>{_text(value)}</b><span>{_text(name)}</span><i>{_text(how)}</i></div>" for name, value, how in tiles)
    return f"<div class=tiles>{''.join(shown)}</div>"


def _leaderboard(report: Report, rows: Sequence[Row]) -> str:
    if not rows:
        return "<p class=note>No run has come to its end yet.</p>"
    names = list(rows[0].settings)
    timed, faster = any(r.draft_seconds is not None for r in rows), any(r.speedup is not None for r in rows)
    head = ["", *(name.rpartition(".")[2] for name in names), report.monitor, "behind the best", "walk_accept_len", "parameters"]
    head += ["block, ms"] * timed + ["speed-up"] * faster + ["seeds"]
    body = []
    for place, row in enumerate(rows):
        cells = [f"{place + 1}", *(_code(_value(row.settings[name])) for name in names), f"<b>{_estimate(row.value)}</b>"]
        cells += ["" if row.behind is None else _estimate(row.behind), "" if row.walk is None else f"{row.walk:.3f}"]
        cells += [f"{row.parameters / 1e6:.2f} M" if row.parameters else ""]
        cells += ["" if row.draft_seconds is None else f"{row.draft_seconds * 1e3:.2f}"] * timed
        cells += ["" if row.speedup is None else f"{row.speedup:.2f}×"] * faster
        cells += [f"{row.value.count}"]
        body.append(cells)
    note = (
        "Mean over seeds ± half the 95 % interval (Student's). Behind the best: over the seeds that both have, so that what a seed does to "
        "both cancels; an interval that holds 0 tells no difference. walk_accept_len: what serving would see."
    )
    return _table(head, body, left=len(names) + 1) + f"<p class=note>{note}</p>"


def _saved(rows: Sequence[tuple[str, str, str]]) -> str:
    return _table(
        ("", "", ""), [[_text(a), f"<b>{_text(b)}</b>", f"<span class=faint>{_text(c)}</span>"] for a, b, c in rows], titled=False
    )


def _commands(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<p class=note>{_text(what)}</p><pre>{_text(command)}</pre>" for what, command in rows)


def _all_runs(report: Report) -> str:
    head = ["run", "state", "settings", "seed", report.monitor, "steps", "own seconds", "error"]
    body = []
    for run in report.runs:
        error = f"<span class=error>{_text(run.error.splitlines()[-1][:160])}</span>" if run.error else ""
        value, seconds = ("" if x is None else f"{x:.3f}" for x in (run.value, run.seconds))
        cells = [_text(run.name), _text(run.state.lower()), _code(_settings(run.settings)), str(run.seed), value]
        body.append([*cells, f"{run.steps}", seconds, error])
    return _table(head, body, left=3)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 99, titled: bool = True) -> str:
    """Cells are HTML already; all columns after the first `left` are numbers."""
    cell = "".join(f"<th{'' if place < left else ' class=n'}>{_text(name)}</th>" for place, name in enumerate(head))
    top = f"<thead><tr>{cell}</tr></thead>" if titled else ""
    kinds = ["" if place < left else " class=n" for place in range(max(map(len, rows), default=0))]
    body = "".join("<tr>" + "".join(f"<td{k}>{v}</td>" for k, v in zip(kinds, row, strict=False)) + "</tr>" for row in rows)
    return f"<div class=wide><table>{top}<tbody>{body}</tbody></table></div>"


def _picture(name: str, draw: figures.Draw, size: tuple[float, float]) -> str:
    light, dark = (
        "data:image/svg+xml;base64," + base64.b64encode(figures.svg(draw, size, theme).encode()).decode()
        for theme in (figures.LIGHT, figures.DARK)
    )
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{name}" src="{light}" style="width:{size[0] / 10.4:.0%}"></picture>'
    )


def _estimate(value: Estimate) -> str:
    return f"{value.mean:.3f}" + ("" if value.half is None else f" <span class=faint>± {value.half:.3f}</span>")


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _text(value: str) -> str:
    return escape(value, quote=False)


def _code(value: str) -> str:
    """A long value is broken into lines, a short one never: a column as narrow as a letter cannot be read."""
    return f"<code{' class=long' if len(value) > SHORT else ''}>{_text(value)}</code>"
