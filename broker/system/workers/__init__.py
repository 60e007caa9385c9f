"""Worker processes that run code of the user's: how to start them, speak to them, limit them and hear what they
print.
"""
