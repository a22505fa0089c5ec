"""The engine on Flower's Grid, and what a site answers; needs expunge[flower]."""

from expunge.extras import require

require("flwr")
