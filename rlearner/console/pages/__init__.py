"""The console's pages: built from the index and the broker, then only changes are sent."""
