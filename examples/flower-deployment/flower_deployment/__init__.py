"""A Flower deployment on one machine: keys and certificates, SuperLink, supervised SuperNodes."""
