"""Commands for existing runs: audit, trace, show, replay, status, runs, pause, stop and more."""
