"""The learner: issues tickets, trains on the samples log, offers weights.

It may import ``broker``, ``rlearner_text`` and ``rlearner_sandbox``.
"""

import broker  # noqa: F401  finds old import paths
