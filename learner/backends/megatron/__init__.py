"""Training by Megatron-core: ``train.backend: megatron``.

``backend`` is what the learner calls and what its ranks obey; see ``learner.backends.ranks`` for how they talk.

- ``architecture``: which models there are in Megatron's terms (pure).
- ``mapping``: Hugging Face's tensors as parts of Megatron's (pure).
- ``shell``, ``files``: a model on disk, looked at without its weights, and these read a share at a time.
- ``grid``: which rank holds what, and the groups in which ranks talk.
- ``model``: Megatron's GPTModel for one stage. The only file that imports Megatron.
- ``vocabulary``: logprobs and entropies of a divided vocabulary.
- ``pipeline``: slices through the stages.
- ``policy``: all of that as a model that scores tokens.
- ``adapters``: factors beside its layers.
- ``exchange``, ``optimizer``: tensors between ranks in Hugging Face's shapes, for offers and checkpoints that know of no ranks.
"""
