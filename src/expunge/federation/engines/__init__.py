"""How work reaches the clients: in this process, or through Flower."""
