"""The rollout server: generates tokens with the learner's weights. Imports no other role."""

import broker  # noqa: F401  finds old import paths
