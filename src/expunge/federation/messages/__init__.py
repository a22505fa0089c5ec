"""What travels between the server and a client: tasks, replies, and their form on the wire."""
