"""Reports of a learner: metrics, trackers, its state, missing processes."""
