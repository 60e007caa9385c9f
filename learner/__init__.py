"""The learner: issues tickets, trains on the samples log, offers weights.

It may import ``broker``, ``rlearner_text``, ``rlearner_sandbox`` and ``rlearner_workers``.
"""

import broker  # noqa: F401  finds old import paths
