"""A deletion request from the desk to a receipt that anyone can check: requests, event log, receipts, tombstones.

What the desk, the page and a checker of receipts need imports no torch; only the work itself does (work.py).
"""
