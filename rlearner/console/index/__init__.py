"""An index of a run's folder in SQLite, and the questions that the console asks it.

``follower.RunFollower`` keeps the index up to date while the run goes on, ``queries.RunQueries``
answers from it, with the dataclasses of ``answers``. Nothing outside this package writes SQL.
docs/console.md says what is indexed, where the database is, and what is not known.
"""
