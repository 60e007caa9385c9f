"""What every process does the same way: start, join a run, tell that it is there, log, drain, end."""
