"""Tickets and their outcomes: the ledger, the tickets on the broker, the records that end them."""
