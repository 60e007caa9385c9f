"""Tasks in Harbor's format: folders with an instruction, an environment and hidden tests."""
