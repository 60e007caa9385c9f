"""The learner's use of the weight channel."""
