"""What the server keeps, in memory and on disk: vectors, updates, checkpoints, one durable store, a journal."""
