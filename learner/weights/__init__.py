"""The learner's side of the weight channel."""
