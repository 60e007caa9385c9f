"""``rlearner replay``: trains again from the archive of a run's records, without any other process.

A checkpoint of the run (or its first weights) gives model, optimizer, RNG and ledger;
``samples/*.frames`` gives the records after its position, byte for byte, including changes of
rules. They pass the same intake, ledger and training as in the live learner
(``learner/consumer.py``). Each step is compared with the run's line in ``metrics.jsonl`` and, if
the run kept its checkpoint, with every tensor of that.
"""
