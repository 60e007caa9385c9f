"""Hosts on one machine: network namespaces on a bridge, and a slow link between two of them."""
