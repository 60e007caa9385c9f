"""Pure state machines that decide which episodes run when, and how a group ends."""
