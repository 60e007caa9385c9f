"""``rlearner doctor``: checks this machine against a configuration, with a command for each gap."""
