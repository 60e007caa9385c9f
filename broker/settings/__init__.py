"""Configuration: files, sections, overrides, the RunSpec, and plug-ins by name."""
