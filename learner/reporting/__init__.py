"""What a learner reports: metrics, trackers, its state, missing processes."""
