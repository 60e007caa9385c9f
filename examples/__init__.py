"""Small programs on rlearner's streams that are not language models; not part of the package."""
