"""The private nats-server of one machine, and the supervisor that restarts it."""
