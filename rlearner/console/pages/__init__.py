"""The console's pages; each builds its content from the index and the broker, and then sends only
what changes.
"""
