"""systemd units of each process: ``deploy/systemd`` for any host, and ``rlearner units`` for a host
of a plan.
"""
