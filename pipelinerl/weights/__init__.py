"""What runs beside the trainer: weight sources, transports, the update round over all servers, verification."""
