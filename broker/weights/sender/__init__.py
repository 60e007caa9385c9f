"""The learner's end of the weight channel."""
