"""One learner on several ranks.

Rank 0 is the learner process: it alone talks to the broker, holds the ledger, cuts micro-batches,
offers weights and commits checkpoints. The other ranks execute its commands and exit with it. On
one machine they are its children, as below; ``learner.nodes`` has those of several machines, which
execute the same commands over other links.

Data flow of a step::

    rank 0                                                        rank 1 … N-1
    forward_backward(samples)
      cut into slices, dealt out by size (``deal``; pure)
      RunCommand(slices, ...)        --- msgpack, socketpair -->  forward, backward: summed gradient
      its own slices: forward, backward
      sums of every slice, in order  <-- SumsReply -------------
    step()
      StepCommand(denominator, at)   ------------------------->
      all-reduce of the summed gradient (torch.distributed: gloo on a CPU, nccl on GPUs)
      divide by the global denominator, clip, update: the same on every rank

The assignment of slices depends only on the samples and their order, so the same layout gives the
same bits after a resume, and any layout the same gradient up to the order of a sum. Samples are
sent as msgpack, gradients and weights by torch.distributed; nothing is pickled. A closed socket
means that a process has ended: children exit with rank 0, and when a child ends, rank 0 logs one
line and exits at once, as if killed; its supervisor restarts it, and it resumes.

``messages`` and ``link`` are the protocol, ``leader`` is rank 0's side, ``children`` starts the
others, ``follower`` is theirs, ``dealing`` deals slices, ``group`` is a process among the ranks,
``rendezvous`` and ``collectives`` wrap torch.distributed. A backend for several ranks subclasses
``learner.backends.torch.TorchBackend`` and builds a ``learner.backends.worker.RankWorker``.
"""
