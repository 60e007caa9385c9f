"""Training with Megatron-core: ``train.backend: megatron``.

``backend`` builds the workers from ``policy`` (a model that scores tokens), ``adapters`` and
``optimizer``. Below them, ``model`` is Megatron's GPTModel for one stage and alone imports
Megatron; ``grid`` assigns ranks, ``mapping`` and ``architecture`` (pure) translate from Hugging
Face, ``model_shell`` opens models, ``pipeline`` runs stages, ``vocabulary`` its divided output
layer, and ``tensor_exchange`` knows what a rank holds of Hugging Face's tensors.

Checkpoints are those of every other backend (``learner.backends.parts``), not
``megatron.core.dist_checkpointing``: its only format, ``torch_dist``, has pickles in its files and
between ranks, plans each checkpoint with collectives, writes in forked processes, has no digests,
and is written only on a GPU.
"""
