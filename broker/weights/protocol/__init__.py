"""What a sender and a receiver of weights agree on; neither imports the other."""
