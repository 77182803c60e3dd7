"""A report as one HTML page, which loads nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from distdl.drawing import Drawing, draw
from distdl.globals.summary.results import GRADIENTS, Row, in_bytes, shown
from distdl.partition import Layout
from distdl.reporting.circle import circle
from distdl.reporting.contents import Contents, Module

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SCRIPT = (
    "document.querySelectorAll('button').forEach(b=>b.onclick=()=>"
    "document.querySelectorAll('#model details').forEach(d=>d.open=b.value=='1'))"
)


def page(contents: Contents) -> str:
    """The text of the page."""
    return _Page(contents).text()


class _Page:
    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.pictures: dict[object, str] = {}  # of layouts that are shown, by what they look like
        self.symbols: list[str] = []

    def text(self) -> str:
        contents = self.contents
        title = f"{contents.title} over {shown(contents.grid)} workers"
        sections = [
            *self._inputs(), *self._model(), *self._memory(), *self._transfers(), *self._fallbacks(), *self._splits(),
            *self._measured(),
        ]  # fmt: skip
        return "\n".join([
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            "<p>From a rehearsal of one forward and backward, which computes nothing and sends nothing.</p>",
            *([f'<svg class="store" aria-hidden="true">{"".join(self.symbols)}</svg>'] if self.symbols else []),
            *sections, f"<script>{_SCRIPT}</script></body></html>", "",
        ])  # fmt: skip

    # -- layouts

    def _picture(self, layout: Layout) -> str:
        """A layout, drawn once in the page and shown wherever it is that of a tensor."""
        key = layout.rulers, layout.partition.workers.tobytes(), layout.partition.workers.shape
        if key not in self.pictures:
            drawn = draw(layout)
            name, size = f"layout-{len(self.symbols)}", f"0 0 {round(drawn.scene.width)} {round(drawn.scene.height)}"
            inside = drawn._repr_svg_().partition(">")[2].rpartition("</svg>")[0]
            fonts = 'font-family="DejaVu Sans,Verdana,Helvetica,Arial,sans-serif" font-size="11"'
            self.symbols.append(f'<symbol id="{name}" viewBox="{size}" {fonts}>{inside}</symbol>')
            wide, high = size.split()[2:]
            self.pictures[key] = (
                f'<svg width="{wide}" height="{high}" viewBox="{size}" role="img" '
                f'aria-label="{escape(drawn.scene.title)}"><use href="#{name}"/></svg>'
            )
        return self.pictures[key]

    def _inputs(self) -> Iterator[str]:
        yield '<section id="input"><h2>Input</h2>'
        for shape, dtype, layout in self.contents.inputs:
            yield f"<p>{shown(shape)}, {escape(str(dtype))}</p>"
            yield "<p>whole on every worker</p>" if layout is None else self._picture(layout)
        yield "</section>"

    # -- the model

    def _model(self) -> Iterator[str]:
        yield '<section id="model"><h2>Model</h2>'
        yield "<p>Open a module for its blocks and the picture of its output. Bytes: the most of any worker.</p>"
        yield '<p><button value="1">open all</button> <button value="0">close all</button></p>'
        yield from self._module(self.contents.root)
        yield "</section>"

    def _module(self, module: Module) -> Iterator[str]:
        row, is_open = module.row, " open" if module.children else ""
        name = module.path.rpartition(".")[2] or "(model)"
        yield f'<details data-path="{escape(module.path)}"{is_open}><summary><span class="name">{escape(name)}</span> '
        yield f'<span class="dim">{escape(module.kind)}</span>'
        told = [("output", shown(row.shape)), ("split", shown(row.split))]
        for what in ("activations", "weights"):
            told.append((what, in_bytes(max((getattr(one, what) for one in module.rows.values()), default=0))))
        told.append(("sends", in_bytes(max((sum(one.sends.values()) for one in module.rows.values()), default=0))))
        if self.contents.measured is not None:
            told += [
                ("computed", _ms(module.computed)),
                ("messages", _ms(module.moved)),
                ("sent", in_bytes(module.sent)),
            ]
        facts = [f"<span>{name} <b>{escape(value)}</b></span>" for name, value in told if value != "-"]
        facts += [f'<span class="mark">{escape(note)}</span>' for note in row.notes if "on one worker" in note]
        yield f'<div class="facts">{"".join(facts)}</div></summary><div class="in">'
        inside = [*self._blocks(module), *([self._picture(row.layout)] if row.layout is not None else [])]
        if inside and module.children:
            inside = ["<details><summary>blocks of its output</summary>", *inside, "</details>"]
        yield from ['<div class="body">', *inside, "</div>"] if inside else []
        for child in module.children:
            yield from self._module(child)
        yield "</div></details>"

    def _blocks(self, module: Module) -> Iterator[str]:
        """What each worker has of a module; workers for which it is the same stand in one line."""
        alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for worker, row in module.rows.items():
            alike[_cells(row)].append(worker)
        head = ["worker", "block", "activations", "weights", "forward", "backward"]
        if any(row.works for row in module.rows.values()) or module.row.shape is not None:
            yield from _table(head, [(", ".join(map(str, workers)), *cells) for cells, workers in alike.items()])
        notes = dict.fromkeys(note for row in module.rows.values() for note in row.notes)
        yield from (f"<p>{escape(note)}</p>" for note in notes)

    # -- the rest

    def _memory(self) -> Iterator[str]:
        alone, totals = self.contents.sequential, self.contents.totals
        most = max([alone.peak, *(one.peak for one in totals.values())]) or 1
        yield '<section id="memory"><h2>Memory at the peak</h2><div class="bars">'
        for name, one in [("sequential", alone), *((f"worker {worker}", one) for worker, one in totals.items())]:
            kind = "bar alone" if one is alone else "bar"
            title = f"{name}: peak {one.peak} bytes, weights {one.weights}, activations {one.activations}"
            yield f'<span>{name}</span><div title="{title}"><div class="{kind}" data-bytes="{one.peak}" '
            yield f'style="width:{100 * one.peak / most:.2f}%"></div></div><span>{in_bytes(one.peak)}</span>'
        yield "</div><p>Weights, their gradients, activations and messages; not the loss or the optimiser's state.</p>"
        head = ["", "peak", "weights", "activations", "messages", "bytes sent"]
        rows = []
        for name, one in [("sequential", alone), *((f"worker {worker}", one) for worker, one in totals.items())]:
            counts = [one.forward[n] + one.backward[n] for n in (0, 1)]
            sizes = map(in_bytes, (one.peak, one.weights, one.activations))
            rows.append((name, *sizes, str(counts[0]) if counts[0] else "-", in_bytes(counts[1])))
        yield from _table(head, rows)
        yield "</section>"

    def _transfers(self) -> Iterator[str]:
        contents = self.contents
        yield '<section id="transfers"><h2>Transfers of a forward and backward</h2>'
        yield Drawing(circle(list(contents.totals), contents.sends))._repr_svg_()
        head, pairs = ["from", "to", "predicted"], sorted({*contents.sends, *contents.carried})
        head += ["in the trace"] if contents.measured is not None else []
        rows = [
            (str(a), str(b), in_bytes(contents.sends[a, b]), in_bytes(contents.carried[a, b]))[: len(head)]
            for a, b in pairs
        ]
        yield f"<details><summary>{len(pairs)} pairs of workers</summary>"
        yield from _table(head, rows)
        yield "</details></section>"

    def _fallbacks(self) -> Iterator[str]:
        yield '<section id="fallbacks"><h2>What falls back, and what is redistributed</h2>'
        rows = []
        for module in self.contents.modules():
            fallen: Counter[str] = Counter()
            split: dict[str, str] = {}
            for row in module.rows.values():
                fallen |= row.falls_back
                split |= row.redistributes
            name = module.path or "(model)"
            rows += [
                (
                    name,
                    f"{one}: distdl has no op for it, so one worker runs it on {in_bytes(n)} that are gathered there",
                )
                for one, n in fallen.items()
            ]
            rows += [(name, f"{one}: its result is split otherwise, {grids}") for one, grids in split.items()]
        yield from (
            _table(["module", "function"], rows, "text")
            if rows
            else ["<p>Nothing: each worker computes its share.</p>"]
        )
        yield "</section>"

    def _splits(self) -> Iterator[str]:
        if self.contents.suggestions is None:
            return
        yield '<section id="splits"><h2>Other splits of the input, the best first</h2>'
        rows = []
        for one in self.contents.suggestions:
            told = one.error or (f"on one worker: {', '.join(one.falls_back)}" if one.falls_back else "")
            rows.append(
                (shown(one.grid), *(("-", "-") if one.error else (in_bytes(one.peak), in_bytes(one.sent))), told)
            )
        yield from _table(["split", "peak", "sent", ""], rows, "text", shown(self.contents.grid))
        yield "</section>"

    def _measured(self) -> Iterator[str]:
        if self.contents.measured is None:
            return
        yield '<section id="measured"><h2>Measured in the trace</h2>'
        rows = [
            (str(one.worker), *map(_ms, (one.total, one.computing, one.packing, one.sending, one.waiting)))
            for one in self.contents.measured
        ]
        yield from _table(["worker", "total", "computing", "packing", "sending", "waiting"], rows)
        yield "<p>The model above has the times of each module, of the slowest worker, over the whole trace.</p>"
        rows = [
            (
                module.path or "(model)",
                _ms(module.computed),
                _ms(module.moved),
                in_bytes(module.sent),
                in_bytes(expected),
            )
            for module in self.contents.modules()
            if module.path != GRADIENTS
            for expected in [sum(sum(row.sends.values()) for row in module.rows.values())]
            if module.computed or module.moved or expected
        ]
        yield from _table(["module", "computed", "messages", "sent in the trace", "predicted for one step"], rows)
        yield "</section>"


def _cells(row: Row) -> tuple[str, ...]:
    forward, backward = (f"{n} of {in_bytes(size)}" if n else "-" for n, size in (row.forward, row.backward))
    return shown(row.block), in_bytes(row.activations), in_bytes(row.weights), forward, backward


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], last: str = "", here: str = "") -> Iterator[str]:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        last: the class of the cells of the last column.
        here: the row that begins with this is marked.
    """
    yield f'<div class="wide"><table><tr>{"".join(f"<th>{escape(one)}</th>" for one in head)}</tr>'
    for row in rows:
        mark = ' class="here"' if here and row[0] == here else ""
        cells = [f"<td>{escape(one)}</td>" for one in row[:-1]]
        kind = f' class="{last}"' if last else ""
        yield f"<tr{mark}>{''.join(cells)}<td{kind}>{escape(row[-1])}</td></tr>"
    yield "</table></div>"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds else "-"
