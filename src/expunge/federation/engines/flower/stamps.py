"""What a site's replies are stamped with."""

STAMP = "expunge"
"""The record in a training reply that names the site; strategies look at array and metric records only."""

PROBLEM = "cannot-help"
"""In the stamp of a site that could not do a task later: why."""

OWN = "own-parts"
"""In the stamp: the parts of a site's model that it trains for itself."""

STRANGE = "strange-parts"
"""In the stamp: the parts of a site's model that have other values there than where it trains."""

TRAINABLE = "trainable"
"""In the stamp: how many parameters of the site's model are trained together."""

FIRST_ONES = "first-samples"
"""In the stamp: a digest of the site's first samples, which should be the same in every round."""
