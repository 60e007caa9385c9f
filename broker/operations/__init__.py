"""What the command ``broker`` does to a run: list and pause runs, show and retry dead letters."""
