"""``rlearner doctor``: compares this machine with a configuration's needs, with a command for each gap."""
