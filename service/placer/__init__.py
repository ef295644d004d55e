"""The placer: decides placements, keeps the ledger, works the queue."""
