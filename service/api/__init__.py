"""The API process: the application, its routes, and what it knows of the board."""
