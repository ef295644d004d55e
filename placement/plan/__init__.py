"""The pass over the queue: which requests start now, and why the others wait."""
