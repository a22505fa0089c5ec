"""Mathematics: torch only; no files, no clients, no printing."""
