"""One kit for child processes that run users' code or work apart from their parent.

- ``start`` and ``environment``: a module of ours as a process, without the parent's secrets.
- ``frames`` and ``link``: messages over a socket that only the two processes have, never pickled.
- ``calls``: what passes between a ``WorkerProcess`` and its parent, and the worker's side of it.
- ``worker_process`` and ``worker_pool``: start, call, watch, kill, replace.
- ``forkserver`` and ``forked_workers``: workers that a prepared process forks in milliseconds.
- ``limits``, ``patience`` and ``output``: memory, time on the worker's own clock, what it prints.

Names of ``broker.system`` below it: ``spawn``, ``WorkClock``, ``kill_tree``, ``fault.told``.
"""
