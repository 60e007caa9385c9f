"""``rlearner doctor``: what this machine has, what a configuration needs, and the command that mends each difference."""
