"""Measurements for a machine with a GPU. Each script checks itself and ends with one line of JSON.

    python -m bench.gpu                     all of them in order; resumes, and writes the table of docs/gpu.md
    python -m bench.gpu.driver | quickstart                                     [--device cpu --tiny]
    python -m bench.gpu.engine | update | weights | ipc | learner | run     [--device cpu --tiny]

Exit code 0: measured, and every check passed. 1: a check failed; the line names it. 2: no GPU, or
bad input. With ``--device cpu --tiny`` the same code runs on a small model without a GPU, which
shows only that it runs.
"""
