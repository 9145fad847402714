"""Foreign code in processes of its own: graders, text games, and programs that a model wrote."""
