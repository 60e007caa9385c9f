"""Tables of the index.

Rows that come from a file name the place they were read at, so that they can be taken back when the
file is cut or replaced. What follows from several rows (the state of a ticket) is computed again
whenever one of them changes.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = 5  # of the tables; an index of another version is rebuilt
PAGE_BYTES: Final = 8192

SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('trajectories', 0);

-- a followed file: up to which byte it was read, and how to recognize it
CREATE TABLE sources (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL,
    first INTEGER NOT NULL DEFAULT 0,
    ino INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL DEFAULT 0,
    mtime INTEGER NOT NULL DEFAULT 0,
    offset INTEGER NOT NULL DEFAULT 0, guard_at INTEGER NOT NULL DEFAULT 0,
    guard INTEGER NOT NULL DEFAULT 0,
    until INTEGER NOT NULL DEFAULT 0, whole INTEGER NOT NULL DEFAULT 0,
    problem TEXT NOT NULL DEFAULT '',
    UNIQUE (kind, name)
);

-- metrics.jsonl: a line ends at byte `end`; `crc` is that of the file up to there
CREATE TABLE steps (
    end INTEGER PRIMARY KEY, start INTEGER NOT NULL, crc INTEGER NOT NULL, step INTEGER NOT NULL,
    time REAL NOT NULL,
    wall REAL, train REAL, offer REAL
);
CREATE INDEX steps_by_step ON steps (step, end);
CREATE INDEX steps_by_time ON steps (time);
CREATE TABLE metrics (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE points (
    metric INTEGER NOT NULL, step INTEGER NOT NULL, value REAL NOT NULL, PRIMARY KEY (metric, step)
) WITHOUT ROWID;

-- ledger/: its lines as they are, and what follows from those of each ticket
CREATE TABLE ledger_lines (
    source INTEGER NOT NULL, end INTEGER NOT NULL, crc INTEGER NOT NULL, first INTEGER NOT NULL,
    ticket INTEGER NOT NULL, state TEXT NOT NULL, seq INTEGER NOT NULL, step INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (source, end)
) WITHOUT ROWID;
CREATE INDEX ledger_lines_by_ticket ON ledger_lines (ticket, first, end) WHERE ticket > 0;
CREATE INDEX ledger_boundaries ON ledger_lines (seq, step) WHERE ticket = 0;
CREATE INDEX ledger_rules ON ledger_lines (first, end) WHERE state = 'rules';
CREATE TABLE tickets (
    ticket INTEGER PRIMARY KEY, state TEXT NOT NULL, domain TEXT NOT NULL,
    task_index INTEGER NOT NULL,
    min_version INTEGER NOT NULL, seq INTEGER NOT NULL, step INTEGER NOT NULL,
    oldest INTEGER NOT NULL,
    newest INTEGER NOT NULL, reason TEXT NOT NULL
);
CREATE INDEX tickets_by_step ON tickets (step) WHERE step > 0;

-- samples/: frames that count, and what is in them
CREATE TABLE frames (
    source INTEGER NOT NULL, offset INTEGER NOT NULL, seq INTEGER NOT NULL, ticket INTEGER NOT NULL,
    length INTEGER NOT NULL, digest BLOB NOT NULL, kind TEXT NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (source, offset)
) WITHOUT ROWID;
CREATE INDEX frames_by_seq ON frames (seq);
CREATE INDEX frames_of_rules ON frames (seq) WHERE kind = 'RulesChange';
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT, source INTEGER NOT NULL, offset INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    ticket INTEGER NOT NULL, hub TEXT NOT NULL, prompt TEXT NOT NULL
);
CREATE INDEX groups_by_place ON groups (source, offset);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY AUTOINCREMENT, grp INTEGER NOT NULL, seq INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    ticket INTEGER NOT NULL, episode INTEGER NOT NULL, domain TEXT NOT NULL,
    task_index INTEGER NOT NULL,
    step INTEGER NOT NULL, state TEXT NOT NULL, reward REAL NOT NULL, success INTEGER NOT NULL,
    ended TEXT NOT NULL,
    tokens INTEGER NOT NULL, sampled INTEGER NOT NULL, turns INTEGER NOT NULL,
    oldest INTEGER NOT NULL,
    newest INTEGER NOT NULL, servers TEXT NOT NULL, greedy INTEGER NOT NULL, preview TEXT NOT NULL
);
CREATE INDEX trajectories_by_group ON trajectories (grp);
CREATE INDEX trajectories_by_ticket ON trajectories (ticket, seq);
-- all that filters and orders read, so that a search scans rows of half the size
CREATE INDEX trajectories_by_seq ON trajectories (
    seq, ordinal, step, reward, sampled, oldest, newest, turns, success, state, domain, servers,
    task_index, ticket, grp
);
CREATE INDEX trajectories_by_step ON trajectories (step, seq, ordinal);

-- evals/, checkpoints/ and logs/
CREATE TABLE evaluated (
    source INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,
    step INTEGER NOT NULL, policy TEXT NOT NULL, domain TEXT NOT NULL, task_index INTEGER NOT NULL,
    episodes INTEGER NOT NULL, successes INTEGER NOT NULL, reward_sum REAL NOT NULL,
    frames INTEGER NOT NULL,
    prompt TEXT NOT NULL, PRIMARY KEY (source, number)
) WITHOUT ROWID;
CREATE INDEX evaluated_by_step ON evaluated (step, policy);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, source INTEGER NOT NULL, key TEXT NOT NULL, time REAL NOT NULL,
    step INTEGER NOT NULL,
    kind TEXT NOT NULL, text TEXT NOT NULL, who TEXT NOT NULL DEFAULT '', UNIQUE (source, key)
);
CREATE INDEX events_by_time ON events (time);

-- what processes said that they did; events of source 0 are theirs
CREATE TABLE lanes (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, until REAL NOT NULL DEFAULT 0
);
CREATE TABLE spans (
    lane INTEGER NOT NULL, kind TEXT NOT NULL, start REAL NOT NULL, end REAL NOT NULL,
    seconds REAL NOT NULL,
    count INTEGER NOT NULL, ticket INTEGER NOT NULL, step INTEGER NOT NULL, sample INTEGER NOT NULL,
    PRIMARY KEY (start, lane, kind, ticket, end)
) WITHOUT ROWID;
CREATE INDEX spans_to_join ON spans (lane, kind, step, start) WHERE ticket = 0;
CREATE TABLE buckets (
    width INTEGER NOT NULL, bucket INTEGER NOT NULL, lane INTEGER NOT NULL, kind TEXT NOT NULL,
    seconds REAL NOT NULL,
    count INTEGER NOT NULL, PRIMARY KEY (width, bucket, lane, kind)
) WITHOUT ROWID;
"""

TEXTS: Final = "CREATE VIRTUAL TABLE {name} USING fts5(text, content='', tokenize='unicode61')"
# a build without FTS5
PLAIN_TEXTS: Final = "CREATE TABLE {name} (rowid INTEGER PRIMARY KEY, text TEXT NOT NULL)"
# by id of the trajectory; by id of the group
TEXT_TABLES: Final = ("response_texts", "prompt_texts")
