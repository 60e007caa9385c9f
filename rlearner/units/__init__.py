"""systemd units: ``deploy/systemd`` for any host, and ``rlearner units`` for a host of a plan."""
