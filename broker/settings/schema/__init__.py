"""Every section of a run's configuration. Roles read each other's, so none belongs to a role."""
