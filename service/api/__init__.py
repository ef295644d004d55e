"""The api process: the application, its routes, and its view of the board."""
