"""Who a process is on the broker: keys, the folder that holds them, join tokens and signatures."""
