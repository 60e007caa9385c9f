"""The process ``sandboxhub``: sandboxes of this host for environments on others, over HTTP."""
