"""Models whose vocabularies differ: the difference, and logprobs carried from one to the other."""
