"""The ledger: decisions, intents, queue, charges and audit in one SQLite file."""
