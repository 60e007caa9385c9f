"""Deep Q-learning on CartPole: in one process (``dqn``), and with actors on other processes
(``actors``).
"""
