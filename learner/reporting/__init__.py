"""What a learner tells: metrics, trackers, its state, whom it waits for."""
