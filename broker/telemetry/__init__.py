"""Names of metrics in Prometheus, and traces of tickets."""
