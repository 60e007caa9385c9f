"""The reward hub, which scores episodes.

It may import ``broker``, ``rlearner_text`` and ``rlearner_sandbox`` only.
"""

import broker  # noqa: F401  finds old import paths
