"""From scored groups to what the loss is taken over. Pure, but for the models that are asked."""
