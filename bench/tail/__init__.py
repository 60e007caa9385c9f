"""Long-tailed answers in simulated time: the real schedulers against schedules that know all
lengths.
"""
