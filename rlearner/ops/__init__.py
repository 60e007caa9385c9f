"""What the operator of a run asks for: audit, trace, status, pause, resume, drain, stop."""
