"""Where weights lie between the model and the wire: staging buffers, host memory and device memory
that others may read.
"""
