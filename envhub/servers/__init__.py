"""Which rollout servers a hub follows and asks, and what it does when one does not answer."""
