"""The placer: decides about placements, owns the ledger and works the queue."""
