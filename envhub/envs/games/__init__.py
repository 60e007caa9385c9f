"""Games whose rules are written here, and gymnasium's frozen lake."""
