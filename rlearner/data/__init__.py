"""The command ``rlearner data``: works on data sets."""
