"""Where the members of a weight transfer meet: a torch store over ZeroMQ CURVE, for admitted
servers only.
"""
