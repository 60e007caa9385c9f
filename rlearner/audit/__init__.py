"""``rlearner audit``: checks that every ticket has one final state, and no group is lost or too
old.
"""
