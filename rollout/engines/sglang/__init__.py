"""The engine ``sglang``: an SGLang server as a child process."""
