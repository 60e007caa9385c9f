"""Queries of trajectories: filters, orders, pages."""

from __future__ import annotations

import json
import sqlite3
from typing import Any, Final

from broker.errors import ConfigError
from rlearner.console.index import database
from rlearner.console.index.answers import TrajectoryFilter, TrajectoryPage, TrajectoryRow
from rlearner.console.index.texts import match_expression, words_of

ORDERS: Final[dict[str, tuple[str, str]]] = {  # expression, direction
    "newest": ("t.seq", "DESC"),
    "oldest": ("t.seq", "ASC"),
    "reward_high": ("t.reward", "DESC"),
    "reward_low": ("t.reward", "ASC"),
    "longest": ("t.sampled", "DESC"),
    "shortest": ("t.sampled", "ASC"),
    "most_turns": ("t.turns", "DESC"),
    "stalest": (
        "CASE WHEN t.step > 0 AND t.oldest >= 0 THEN t.step - 1 - t.oldest ELSE -1 END",
        "DESC",
    ),
}
_COLUMNS: Final = (
    "t.id, t.seq, t.ordinal, t.ticket, t.episode, t.domain, t.task_index, t.step, t.state, "
    "t.reward, t.success, "
    "t.ended, t.tokens, t.sampled, t.turns, t.oldest, t.newest, g.hub, t.servers, t.greedy, "
    "g.prompt, t.preview"
)
_FROM: Final = "FROM trajectories t"


def domains(connection: sqlite3.Connection) -> list[str]:
    return [
        name
        for (name,) in connection.execute(
            "SELECT DISTINCT domain FROM tickets WHERE domain != '' ORDER BY 1"
        )
    ]


def search(
    connection: sqlite3.Connection,
    criteria: TrajectoryFilter,
    order: str,
    limit: int,
    after: str,
    *,
    count: bool,
) -> TrajectoryPage:
    if order not in ORDERS:
        raise ConfigError("order", order, f"one of {', '.join(ORDERS)}")
    conditions, values = _filter_conditions(connection, criteria)
    condition = " AND ".join(conditions) or "1"
    total = None
    if count:
        query = f"SELECT count(*) {_FROM} WHERE {condition}"
        total = connection.execute(query, values).fetchone()[0]
    expression, direction = ORDERS[order]
    # Scanning the index by seq and sorting is faster than walking another one until enough rows
    # match.
    free = "+" if conditions and expression != "t.seq" else ""
    if after:
        sign = "<" if direction == "DESC" else ">"
        condition += f" AND ({free}{expression}, t.seq, t.ordinal) {sign} (?, ?, ?)"
        values = [*values, *_parse_cursor(after)]
    keys = dict.fromkeys([expression, "t.seq", "t.ordinal"])
    inner = ", ".join(f"{free}{column} {direction}" for column in keys)
    outer = ", ".join(f"{column} {direction}" for column in ("key", "t.seq", "t.ordinal"))
    rows = connection.execute(
        f"SELECT key, {_COLUMNS} FROM (SELECT t.id AS found, {expression} AS key {_FROM} WHERE "
        f"{condition}"
        f" ORDER BY {inner} LIMIT ?) JOIN trajectories t ON t.id = found JOIN groups g ON g.id = "
        "t.grp"
        f" ORDER BY {outer}",
        [*values, limit + 1],
    ).fetchall()
    page_rows = [_trajectory_row(row[1:]) for row in rows[:limit]]
    last = (
        json.dumps([rows[limit - 1][0], page_rows[-1].seq, page_rows[-1].ordinal])
        if len(rows) > limit and page_rows
        else ""
    )
    return TrajectoryPage(page_rows, last, total)


def _trajectory_row(row: tuple[Any, ...]) -> TrajectoryRow:
    values = list(row)
    values[10] = bool(values[10])
    values[19] = bool(values[19])
    return TrajectoryRow(*values)


def _parse_cursor(after: str) -> list[float]:
    try:
        position = json.loads(after)
    except ValueError:
        position = None
    if (
        not isinstance(position, list)
        or len(position) != 3
        or not all(type(number) in (int, float) for number in position)
    ):
        raise ConfigError("after", after, "the `after` of a page")
    return position


def _filter_conditions(
    connection: sqlite3.Connection, criteria: TrajectoryFilter
) -> tuple[list[str], list[Any]]:
    choices: list[tuple[str, Any]] = [
        ("t.step >= ?", None if criteria.min_step is None else max(criteria.min_step, 1)),
        ("t.step <= ?", criteria.max_step),
        ("t.step > ?", None if criteria.max_step is None else 0),
        ("t.domain = ?", criteria.domain or None),
        ("t.reward >= ?", criteria.min_reward),
        ("t.reward <= ?", criteria.max_reward),
        ("t.newest >= ?", criteria.min_version),
        ("t.oldest <= ?", criteria.max_version),
        ("t.oldest >= ?", None if criteria.max_version is None else 0),
        ("t.success = ?", criteria.success),
        ("t.state = ?", criteria.state or None),
        ("t.ticket = ?", criteria.ticket),
        ("t.task_index = ?", criteria.task_index),
        ("instr(' ' || t.servers || ' ', ' ' || ? || ' ')", criteria.server or None),
        ("t.grp IN (SELECT id FROM groups WHERE hub = ?)", criteria.hub or None),
    ]
    chosen_conditions = [(text, value) for text, value in choices if value is not None]
    conditions = [text for text, _ in chosen_conditions]
    values = [value for _, value in chosen_conditions]
    if criteria.text.strip():
        text, more = _text_condition(connection, criteria.text)
        conditions.append(text)
        values += more
    return conditions, values


def _text_condition(connection: sqlite3.Connection, text: str) -> tuple[str, list[Any]]:
    if not (words := words_of(text)):
        return "0", []
    if database.has_fts(connection):
        matching = "SELECT rowid FROM {0} WHERE {0} MATCH ?"
        values: list[Any] = [match_expression(text)]
    else:
        matching = "SELECT rowid FROM {0} WHERE " + " AND ".join(
            ["instr(lower(text), ?)"] * len(words)
        )
        values = [word.lower() for word in words]
    of_response = matching.format("response_texts")
    of_prompt = matching.format("prompt_texts")
    return f"(t.id IN ({of_response}) OR t.grp IN ({of_prompt}))", [*values, *values]
