"""The accounts of a nats-server and what crosses between them, derived from the table of streams.

JetStream, the operator and the learners have one account. Each joining role of a run has an account
of its own, which imports the services that its permissions name, and nothing else: the streams that
it may ask for, the subjects that it writes, the requests that others answer. A server renames the
reply subject of whatever crosses, so that a reply reaches its requester's account only, where there
is nothing that the requester could not have sent itself.

What a role hears (metrics, presence, news of last values) crosses as a service, too: a writer's
account imports it from that of JetStream, which imports it from the relay, an account without
users, and the relay from each account that hears it. A subject that goes one way between two
accounts cannot go back, which would be a cycle: what a role hears of a stream is the subjects of
the other roles.

The relay is there for the time that a server takes to read its configuration: it compares each
import from an account with every import of that account, and most are from that of JetStream
(nats-server 2.15.1, ``checkServiceImportsForCycles``). So that one imports a few patterns of any
run, not 25 subjects of each, which took three fifths of a reload with 50 runs.

Nothing is imported as a stream: a subscription to an imported stream that arrives while a server
reads its configuration again ends that server (nats-server 2.15.1, ``addShadowSub``).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from broker.contract.permissions import (
    API,
    JOINING,
    LEARNER,
    OBSERVER,
    OPERATOR,
    STORED,
    can_hear,
    own_subjects,
    stored_requests,
)
from broker.contract.streams import KV, REQUEST, ROLES, STREAMS, Stream

ACCOUNT: Final = "RLEARNER"
RELAY: Final = f"{ACCOUNT}_RELAY"  # no role has this name
# an account without JetStream answers requests to its API itself, so they are renamed
MAPPED_API: Final = "RLJS"


@dataclass(frozen=True)
class Export:
    """Subjects of an account that others may import; who does is up to the same configuration.

    Attributes:
        subject: the pattern.
        is_request: whether a process answers, not the server.
    """

    subject: str
    is_request: bool = False

    @property
    def has_many_replies(self) -> bool:
        """Whether one request may have more than one reply."""
        return self.subject.startswith(f"{API}.CONSUMER.MSG.NEXT.")

    def is_part_of(self, other: Export) -> bool:
        """Return whether another export has all subjects of this one; accounts of JWTs may not have
        both.
        """
        parts = self.subject.split(".")
        other_parts = other.subject.split(".")
        if self == other or len(parts) != len(other_parts):
            return False
        return all(pattern in ("*", part) for part, pattern in zip(parts, other_parts, strict=True))


@dataclass(frozen=True)
class Import:
    """Subjects that an account imports.

    Attributes:
        exporter: account that answers, or listens.
        subject: in that account.
    """

    exporter: str
    subject: str

    @property
    def local_subject(self) -> str:
        """The subject in the importing account."""
        return map_subject(self.subject)


@dataclass
class Account:
    """An account with what crosses its border; dicts for their order."""

    name: str
    exports: dict[Export, None] = field(default_factory=dict)
    imports: dict[Import, None] = field(default_factory=dict)


def account_of(role: str, run: str) -> str:
    """Return the name of the account of a role of a run."""
    return ACCOUNT if role in (OPERATOR, LEARNER) else f"{ACCOUNT}_{run}_{role}"


def map_subject(subject: str) -> str:
    """Return a subject as the account of a joining role has it."""
    if subject.startswith(f"{API}."):
        return subject.replace(f"{API}.", f"{MAPPED_API}.", 1)
    return subject


def unmap_subject(subject: str) -> str:
    """Return the subject that a client used, from one that a server names in a refusal, in any
    case.
    """
    if subject.upper().startswith(f"{MAPPED_API}."):
        return f"{API}.{subject[len(MAPPED_API) + 1 :]}"
    return subject


def accounts_of(users: Iterable[tuple[str, str]]) -> list[Account]:
    """Return the accounts for users of these roles and runs: that of JetStream, the relay, and
    those of the runs.

    The joining roles of a run get theirs together, so that a server meets new accounts once.
    """
    roles: dict[str, set[str]] = {}
    for role, run in users:
        if role != OPERATOR:
            roles.setdefault(run, set(JOINING)).update({role} & {OBSERVER})
    accounts = {name: Account(name) for name in (ACCOUNT, *([RELAY] if roles else []))}
    for run, joining in sorted(roles.items()):
        accounts |= {
            name: Account(name) for name in (account_of(role, run) for role in sorted(joining))
        }
        for importer, imported, is_request in _list_crossings(run, sorted(joining)):
            accounts[importer].imports[imported] = None
            subject = imported.subject
            if imported.exporter == ACCOUNT:
                subject = _of_any_run(subject, run)
            accounts[imported.exporter].exports[Export(subject, is_request)] = None
    for account in accounts.values():
        account.exports = {
            export: None
            for export in account.exports
            if not any(map(export.is_part_of, account.exports))
        }
    return list(accounts.values())


def _of_any_run(subject: str, run: str) -> str:
    """Return the pattern of a subject in every run: with an export for each, a server takes long to
    read them.
    """
    parts = subject.split(".")
    return ".".join("*" if part == run or f"rl_{run}_" in part else part for part in parts)


def _list_crossings(run: str, joining: Collection[str]) -> Iterator[tuple[str, Import, bool]]:
    """Yield (importing account, import, whether a process answers) of a run of which these roles
    have accounts.
    """
    answering = [OPERATOR, LEARNER, *joining]
    for stream in STREAMS:
        for role in joining:
            for subject in _stored_subjects(stream, role, run):
                yield account_of(role, run), Import(ACCOUNT, subject), False
        if stream.kind is REQUEST:
            for writer, reader in itertools.product(answering, answering):
                sending = account_of(writer, run)
                hearing = account_of(reader, run)
                if sending != hearing and _may_write(stream, writer) and stream.reads(reader):
                    imported = Import(hearing, own_subjects(stream, reader, run))
                    yield from _pass_on(stream, sending, imported, run)
        else:
            yield from _list_news(stream, joining, run)
    if OBSERVER in joining:
        yield account_of(OBSERVER, run), Import(ACCOUNT, f"{API}.INFO"), False


def _stored_subjects(stream: Stream, role: str, run: str) -> list[str]:
    """Return what a joining role asks of JetStream and stores there."""
    is_stored = stream.kind in STORED and _may_write(stream, role)
    return [
        *stored_requests(stream, role, run),
        *([own_subjects(stream, role, run)] if is_stored else []),
    ]


def _list_news(
    stream: Stream, joining: Collection[str], run: str
) -> Iterator[tuple[str, Import, bool]]:
    """Yield what roles send to others without the broker storing it, and the news of what they
    store.
    """
    for role in joining:
        account = account_of(role, run)
        own = own_subjects(stream, role, run) if _may_write(stream, role) else ""
        if own and stream.kind not in STORED:  # what is stored is sent to be stored
            yield account, Import(ACCOUNT, own), False
        if not can_hear(stream, role):
            continue
        for writer in ROLES:
            subject = own_subjects(stream, writer, run)
            if _may_write(stream, writer) and subject != own:
                yield from _pass_on(stream, ACCOUNT, Import(account, subject), run)


def _pass_on(
    stream: Stream, sending: str, imported: Import, run: str
) -> Iterator[tuple[str, Import, bool]]:
    """Yield the imports by which a subject reaches an account that hears it: from the account of
    JetStream, through the relay.
    """
    is_request = stream.kind is REQUEST
    if sending == ACCOUNT and imported.exporter != ACCOUNT:
        subject = own_subjects(stream, "*", run)
        # the name of a bucket has that of its run
        pattern = subject if stream.kind is KV else _of_any_run(subject, run)
        yield ACCOUNT, Import(RELAY, pattern), is_request
        sending = RELAY
    yield sending, imported, is_request


def _may_write(stream: Stream, role: str) -> bool:
    """Return whether a role writes; the operator may write everything, an observer nothing."""
    return role == OPERATOR or (stream.writes(role) and role != OBSERVER)
