"""The console's own elements: Vue components that get data and make text of it, never markup."""

from __future__ import annotations

from typing import Any

from nicegui import ui
from nicegui.element import Element


class Chart(Element, component="web/chart.js"):
    """Lines over steps; see ``chart.js``.

    Args:
        series: ``{name, x, y}`` each, and optionally ``color``, ``low`` and ``high`` (a band),
            ``dots``, ``means`` (of the steps that each point stands for) and ``times`` (seconds
            of its run at each point, if several runs are on the chart).
        events: ``{step, kind, text}`` each.
        more: ``arranged``: it may be moved and hidden among the other ones.
    """

    def __init__(
        self, title: str, series: list[dict[str, Any]], events: list[dict[str, Any]], **more: Any
    ) -> None:
        super().__init__()
        self._props |= {"title": title, "series": series, "events": events, **more}

    def tell_all(self, kind: str, marks: Any) -> None:
        """Give every chart of the page all ``marks``, in one message."""
        self.run_method("tell", kind, marks)


class ChartControls(Element, component="web/controls.js"):
    """Smoothing, axis and hidden charts of a page; see ``controls.js``.

    Args:
        clock: ``{x, y}``: steps, and when their lines were written.
        kept: how the charts were shown last, for a browser that was not here before.
        arranged: whether the page's charts may be moved and hidden.
    """

    def __init__(
        self, clock: dict[str, list[float]], kept: dict[str, Any] | None, *, arranged: bool
    ) -> None:
        super().__init__()
        self._props |= {"clock": clock, "kept": kept, "arranged": arranged}


class Grid(Element, component="web/grid.js"):
    """A table of texts and links; see ``grid.js``."""

    def __init__(
        self, label: str, columns: list[dict[str, Any]], rows: list[dict[str, Any]], **more: Any
    ) -> None:
        super().__init__()
        self._props |= {"label": label, "columns": columns, "rows": rows, **more}
        self._known = {row["key"]: row for row in rows}

    def change(self, rows: list[dict[str, Any]]) -> None:
        """Show these rows, and send only those that are new or changed."""
        rows_by_key = {row["key"]: row for row in rows}
        changed = [row for row in rows if self._known.get(row["key"]) != row]
        if changed or list(rows_by_key) != list(self._known):
            self._known = rows_by_key
            self.run_method("change", changed, list(rows_by_key))


class Changing(Element):
    """An element with parts, each with a ``key``, of which only those that changed are sent."""

    def __init__(self, prop: str, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self._props[prop] = parts
        self._known = {part["key"]: part for part in parts}

    def change(self, parts: list[dict[str, Any]], *more: Any) -> None:
        """Show these parts; ``more`` is sent with them."""
        changed = [part for part in parts if self._known.get(part["key"]) != part]
        if changed or any(more):
            self._known |= {part["key"]: part for part in changed}
            self.run_method("change", changed, *more)


class Stats(Changing, component="web/stats.js"):
    """A row of figures: ``{key, label, value, note, tone}`` each.

    ``change`` also takes new points of the page's charts, as each message costs the time of many
    points.
    """

    def __init__(self, stats: list[dict[str, Any]]) -> None:
        super().__init__("stats", stats)


class Flow(Changing, component="web/flow.js"):
    """Queues and processes: ``{key, node, lines}`` or ``{key, edge, count, title}`` each."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__("parts", parts)


class Lanes(Element, component="web/lanes.js"):
    """The timeline; see ``lanes.js``."""

    def __init__(self, first: dict[str, Any], base: str, *, follow: bool) -> None:
        super().__init__()
        self._props |= {"first": first, "base": base, "follow": follow}


class Tokens(Element, component="web/tokens.js"):
    """Episodes token by token; see ``tokens.js``."""

    def __init__(
        self, episodes: list[dict[str, Any]], unavailable: dict[str, str], start: str
    ) -> None:
        super().__init__()
        self._props |= {"episodes": episodes, "unavailable": unavailable, "start": start}


def tag(kind: str, /, text: str | None = None, classes: str = "", **props: Any) -> Element:
    """Make an HTML element; the text is set as text, so nothing in it becomes markup."""
    element = ui.element(kind)
    if classes:
        element.classes(classes)
    element._props |= {key.replace("_", "-"): value for key, value in props.items()}
    if text is not None:
        element._text = text
    return element


def banner(text: str, tone: str = "", **props: Any) -> Element:
    """Say one line above the page's content."""
    return tag("div", text, f"banner {tone}", role="status", **props)
