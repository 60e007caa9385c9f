"""What every process does in the same way: start, join a run, announce itself, log, drain, end."""
