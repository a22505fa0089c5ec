"""Who holds what, and how work reaches them."""
