"""Commands for existing runs: audit, trace, show, replay, status, runs, pause, resume, drain, stop."""
