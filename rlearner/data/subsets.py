"""``rlearner data sample``: draws rows so that each stratum keeps its share, or all are equal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from broker.errors import UserError
from broker.system.private_files import draft_of
from broker.system.visible_text import visible, visible_json
from learner.credit.pass_rate_file import KEY_BYTES, read_pass_rates
from rlearner_text.rows.columns import Row, column_value, digest_row
from rlearner_text.rows.reading import read_rows
from rlearner_text.rows.sources import DataSource

DIFFICULTY: Final = "difficulty"
# More are no kinds of rows: the column holds a text, or a number of its own in each row.
MAX_STRATA: Final = 100
MISSING: Final = "none"
UNMEASURED: Final = "not measured"
# Names of pass rates up to each bound; 0 and 1 stand alone, as they train nothing.
BANDS: Final = (
    (0.25, "0 to 0.25"),
    (0.5, "0.25 to 0.5"),
    (0.75, "0.5 to 0.75"),
    (1.0, "0.75 to 1"),
)


def sample_file(options: argparse.Namespace) -> int:
    """Write the drawn rows, print how many of each stratum there are, and return the exit code.

    Raises:
        UserError: if the data set or the pass rates cannot be read, or there are too few rows.
    """
    source = DataSource(options.file, options.subset, options.split)
    source.check("FILE")
    out = Path(options.out)
    if out.exists():
        raise UserError(f"--out {out}: the file exists; name a new one")
    rows = [row for _, row in read_rows(source, "FILE")]
    strata = _name_strata(options, rows)
    if options.n > len(rows):
        raise UserError(f"--n {options.n}: {options.file} has {len(rows)} rows")
    drawn = draw_rows(strata, options.n, equal=options.equal, seed=options.seed)
    lines = (json.dumps(rows[index], ensure_ascii=False) + "\n" for index in drawn)
    with draft_of(out) as draft:
        draft.write_text("".join(lines), encoding="utf-8")
    counts = [
        {
            "value": name,
            "rows": strata.count(name),
            "drawn": sum(strata[index] == name for index in drawn),
        }
        for name in sorted(set(strata))
    ]
    if options.json:
        print(visible_json({"out": str(out), "rows": len(drawn), "strata": counts}))
    else:
        print(visible(_describe(options.by, str(out), counts), newlines=True))
    return 0


def draw_rows(strata: Sequence[str], num_rows: int, *, equal: bool, seed: int) -> list[int]:
    """Return indices of drawn rows in their order.

    Args:
        strata: name of each row's stratum.
        equal: as many of each stratum, as far as it has them, instead of its share.
    """
    members: dict[str, list[int]] = {}
    for index, name in enumerate(strata):
        members.setdefault(name, []).append(index)
    sizes = {name: len(indices) for name, indices in sorted(members.items())}
    allot = allot_equally if equal else allot_by_share
    drawn: list[int] = []
    for name, number in allot(sizes, num_rows).items():
        ordered = sorted(members[name], key=lambda index: _draw_key(seed, index))
        drawn += ordered[:number]
    return sorted(drawn)


def allot_by_share(sizes: Mapping[str, int], num_rows: int) -> dict[str, int]:
    """Return rows of each stratum by its share; the largest remainders get the last ones."""
    total = sum(sizes.values())
    numbers = {name: size * num_rows // total for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: -(sizes[name] * num_rows % total))
    for name in by_remainder[: num_rows - sum(numbers.values())]:
        numbers[name] += 1
    return numbers


def allot_equally(sizes: Mapping[str, int], num_rows: int) -> dict[str, int]:
    """Return as many rows of each stratum; what small ones lack goes to the others."""
    numbers = dict.fromkeys(sizes, 0)
    remaining = num_rows
    while remaining:
        for name, size in sizes.items():
            if remaining and numbers[name] < size:
                numbers[name] += 1
                remaining -= 1
    return numbers


def name_band(rate: float | None) -> str:
    """Return the stratum of a pass rate; None: it was not measured."""
    if rate is None:
        return UNMEASURED
    if rate in (0, 1):
        return f"{rate:g}"
    return next(name for bound, name in BANDS if rate <= bound)


def _name_strata(options: argparse.Namespace, rows: Sequence[Row]) -> list[str]:
    if options.by == DIFFICULTY:
        if options.pass_rates is None:
            raise UserError("--by difficulty: name the pass rates by --pass-rates RUN")
        rates = read_pass_rates(options.pass_rates, "--pass-rates")
        strata = [name_band(rates.get(digest_row(row)[:KEY_BYTES])) for row in rows]
        if rows and set(strata) == {UNMEASURED}:
            raise UserError(f"--pass-rates {options.pass_rates}: it has no row of {options.file}")
        return strata
    values = [column_value(row, options.by) for row in rows]
    if rows and all(value is None for value in values):
        raise UserError(f"--by {options.by}: {options.file} has no such column")
    names = [_name_value(value) for value in values]
    if (number := len(set(names))) > MAX_STRATA:
        raise UserError(f"--by {options.by}: it has {number} values; expected at most {MAX_STRATA}")
    return names


def _name_value(value: Any) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _draw_key(seed: int, index: int) -> bytes:
    return blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()


def _describe(by: str, out: str, counts: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'drawn':>8} {'of':>8}  {by}"]
    lines += [f"{row['drawn']:>8} {row['rows']:>8}  {row['value']}" for row in counts]
    return "\n".join([*lines, f"wrote {out}"])
