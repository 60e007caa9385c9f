"""Tickets in, groups and closings out; and how a ticket that kills hubs is found."""
