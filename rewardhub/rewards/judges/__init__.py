"""What the rewards that ask a judge share: the endpoint, templates, and schemas of answers."""
