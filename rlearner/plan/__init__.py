"""``rlearner plan``: which layouts of a run fit a number of GPUs, and the memory of each part.

``model_reader`` reads sizes from a model's config.json and traces one pass on torch's meta device;
everything after it is arithmetic: ``training_memory`` and ``serving_memory`` per GPU,
``throughput``, ``layouts`` (what there is to choose from), ``candidates`` (what fits), ``plans``
(ranked), ``misfits`` and ``remedies`` (why nothing fits, and what would), ``report``, ``scripts``
and ``write``.
"""
