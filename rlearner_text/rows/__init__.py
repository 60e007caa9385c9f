"""Reads data sets: files, folders and names on the Hugging Face hub, in the forms people have."""
