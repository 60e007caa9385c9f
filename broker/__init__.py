"""What every process shares: the wire contract, NATS and request channels, settings, process runtime, weight transfer.
Imports no role.
"""
