"""The placer: it decides placements, owns the ledger, and starts jobs from the queue."""
