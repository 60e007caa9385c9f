"""``rlearner replay``: trains again from the archive of a run's records, without a broker or any other process.

The data flow: a checkpoint of the run (or its first weights) gives model, optimizer, RNG and ledger; ``samples/*.frames`` gives the
records behind its position, byte for byte; ``ledger/`` says by which rules the run went at the time. They pass the same intake,
ledger and training as in the live learner (``learner/consumer.py``). Each step is held against the run's line in
``metrics.jsonl`` and,
where the run kept a checkpoint of it, every tensor against that.
"""
