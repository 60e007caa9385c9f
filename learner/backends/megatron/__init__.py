"""Training with Megatron-core: ``train.backend: megatron``.

``backend`` builds the workers from ``policy`` (a model that scores tokens), ``adapters`` and ``optimizer``. Below them,
``model`` is Megatron's GPTModel for one stage and alone imports Megatron; ``grid`` assigns ranks, ``mapping`` and
``architecture`` (pure) translate from Hugging Face, ``model_shell`` and ``weight_files`` read models, ``pipeline`` runs
stages, ``vocabulary`` its divided output layer, and ``tensor_exchange`` moves tensors in Hugging Face's shapes.
"""
