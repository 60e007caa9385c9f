"""Commands for a run that exists: audit, trace, show, replay, status, runs, pause, resume, drain, stop."""
