"""A rollout server's end of the weight channel."""
