"""Word lists of the house rules. A list may only grow."""

from __future__ import annotations

from typing import Final

# Names that say nothing of a value: pronouns, participles, question words.
EMPTY_NAMES: Final = frozenset(
    """
    one ones other others another each all any both some none it its this that these those such
    same rest everything anything nothing something found made given told asked shown held left
    taken kept sent seen known done got gone put said read heard wanted tried used served played
    ended started stopped lost spent chosen drawn written stored loaded named called counted
    wished meant due told been begun what who whom whose which when where why how before after
    then now here there again already still yet meanwhile
    """.split()  # noqa: SIM905
)
EMPTY_NAMES_ALLOWED: Final = frozenset(
    {"now", "all", "read", "none"}
)  # a time stamp; protocols and libraries

# Words that nobody says today, and metaphors that name no thing of the field.
ARCHAIC: Final = frozenset(
    """
    whoever whomever whatsoever wherein whereby thereby therein thereof hereby hitherto
    henceforth anew meanwhile lest ere whilst amongst beside behold betwixt nursery nurseries
    bury buries buried burial burials turnstile lookout landing
    """.split()  # noqa: SIM905
)
