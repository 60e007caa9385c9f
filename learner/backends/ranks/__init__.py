"""One learner on several ranks of one machine.

Rank 0 is the learner's own process: it alone talks to the broker, holds the ledger, cuts micro-batches, offers weights and writes
checkpoints. The other ranks are children of it that do as they are told and die with it.

Data flow of a step::

    rank 0                                                        rank 1 … N-1
    forward_backward(samples)
      cut into slices, dealt out by size (``deal``; pure)
      Run(slices, kl_coef, version)  --- msgpack, socketpair -->  forward, backward: gradient summed up, not normalised
      its own slices: forward, backward
      sums of every slice, in order  <-- Sums ------------------
    step()
      Step(denominator, at)          ------------------------->
      all-reduce of the summed gradient (torch.distributed: gloo on a CPU, nccl on GPUs)
      divide by the global denominator, clip, update: the same on every rank

Which rank computes what depends on the samples and their order alone, so the same layout gives the same bits after a resume, and any
layout the same gradient up to the order of a sum. Samples cross processes as msgpack, gradients and weights through torch.distributed;
nothing is pickled. A socket that closes says that a process is gone: children leave when rank 0 is gone, and when a child is gone rank 0
says so in one line and ends at once, as if it had been killed; whoever supervises it starts it again, and it resumes.

``messages`` is what crosses, ``link`` how, ``leader`` rank 0's side, ``follower`` the children's, ``dealing`` who gets which slices,
``meeting`` and ``collectives`` what all do at once, ``critic`` what becomes of a critic. A backend for several ranks subclasses
``learner.backends.ddp.DdpBackend`` and is one file and one line of the registry.
"""
