"""What several benchmarks share: fleets of real processes, made-up servers, cases, statistics. No commands."""
