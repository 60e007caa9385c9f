"""Search by meaning as a process of its own, and over HTTP in the form of Search-R1."""
