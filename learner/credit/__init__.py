"""Who was granted a group and what became of it: the ledger, tickets, and the records that end them."""
