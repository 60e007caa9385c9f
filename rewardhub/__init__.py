"""The reward hub, which scores episodes.

It may import ``broker``, ``rlearner_text``, ``rlearner_sandbox`` and ``rlearner_workers`` only.
"""

import broker  # noqa: F401  finds old import paths
