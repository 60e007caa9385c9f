"""Which episodes run when, and how a group ends: pure state machines."""
