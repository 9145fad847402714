"""Weight updates: sources, transports, one update of all servers, verification."""
