"""Tickets and their outcomes: the ledger, the tickets on the broker, and the records that end them."""
