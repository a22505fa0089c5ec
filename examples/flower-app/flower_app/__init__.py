"""A Flower app that trains a digit classifier on a few hospitals, and can forget each of them."""
