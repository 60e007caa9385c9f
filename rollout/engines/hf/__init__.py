"""The engine ``hf``: any transformers causal language model, batched continuously."""
