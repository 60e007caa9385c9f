"""One transfer, as a conversation through the rendezvous store.

    receiver r                        sender
    held/r  = digest           --->                                 what it holds already, if it knows
    ready/r = "" or a reason   --->
                               <---   go = "", changes or a reason  nobody enters the collective unless all are here;
                                                                    changes: if all hold what the sender's copy says
                               <---   size/i = bytes or whole       changes only, before each bucket
                               <---   go = stripes                  each learner rank broadcasts a part of the bytes,
                                                                    see broker.weights.stripes
    ------- broadcast of the buckets as they are packed, digest pipelined; or, on the sender's host, they are read -----
    ------- where they are packed (broker.weights.memory.shared), by ranks that come after the communicator's      -----
    at/r    = buckets          --->                                 read so far, now and then
                               <---   digest                        for those whose offer came before it was known
    done/r  = "" or a reason   --->                                 bytes right, or why not; "peer: ": by another
                               <---   stop = reason                 at any time: leave, ask again

By CURVE no member needs another: the sender leaves behind those that fail and finishes with the
rest. By other carriers it ends a transfer that lacks a member, and knows whom to blame: members
that report their own fault, else those that are silent while others report a lost peer. A failing
member ends the others' wait; only a peer that hangs during the broadcast costs its timeout. The
sender's side is ``broker.weights.sender.transfer``, the receiver's
``broker.weights.receiver.follow``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker.weights.group import Group

CHANGES: Final = "changes"
STRIPES: Final = "stripes"
PEER: Final = "peer: "
SAY_EVERY_S: Final = 1.0  # between progress reports of a receiver that reads


@dataclass(frozen=True)
class ReceivedVersion:
    """A received version; its communicator, if there was one, can be reused."""

    communicator: Group | None
    digest: str
