"""The models of a training backend: policy, reference, critic and adapters, and their batches."""
