"""Sandboxes of namespaces and overlay file systems of this host, without a daemon."""
