"""The page on a ledger; its files are served as they are."""

from expunge.extras import require

require("fastapi")
