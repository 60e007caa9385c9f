"""A learner over several nodes.

Rank 0 is the learner process of node 0, which alone talks to the broker. A process per rank joins
it, on every node::

    node 0                                          node 1
    rlearner start … --node-rank 0                  rlearner start … --node-rank 1
      = rank 0: Gathering, then NodeRanks             = run_node: starts its ranks and waits
      └ starts ranks 1, 2, … of node 0 (rank.py)      ├ rank.py
                                                      └ rank.py
    every rank above 0 (rank.py)                    rank 0
      key file                                        key file
      node, number, token       --- rendezvous -->    opens a link for it, answers with its port
      Hello: versions, settings --- link --------->   Roll: the first difference ends all
                                <-- link ----------   FoldersCommand: model folders must not differ
                                <-- link ----------   BuildCommand, RunCommand, … as on one host
      torch.distributed         <----------------->   meets in the rendezvous
                                <-- link ----------   EndCommand: exit code

Under torchrun and srun the ranks are started there instead, and find their place in the environment
(``placement``). The rendezvous is a ``BoardServer`` of the weights' rooms, which is also torch's
store; links are ZeroMQ sockets. Both are encrypted by keys that follow from one secret file. What
the ranks exchange in collectives is not.

A connection that ends, or is silent for 15 s, ends rank 0, and with it every other rank, with exit
code 1 for a supervisor. Started again, all meet and resume from the last checkpoint, perhaps on
another number of nodes.
"""
