"""The ledger: decisions, intents, queue, charges, actions and audit in one SQLite file."""
