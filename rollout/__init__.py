"""The rollout server: generates tokens with the learner's weights. Imports no other role."""
