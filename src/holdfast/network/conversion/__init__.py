"""How a model is read: what is known of its class, one run on an example, and the pieces its parts become."""
